//! Two pools of blocks, whose contents can be written and seen, and what moving blocks between them
//! must do.

use crate::fixtures::{Poison, TinyModel};
use crate::harness::{Harness, Rows};
use crate::rng::Rng;
use quire_engine::DType;
use quire_engine::model::{Model, ModelInfo};
use quire_engine::ops::{
    Backend, BlockTransfers, ForwardInput, KvLayout, QkvArgs, Rope, TensorKind,
};
use quire_engine::runner::{Executor, ModelRunner, RunnerSizes};
use quire_model_zoo::decoder::model_info;
use std::ops::Range;

/// Blocks of the KV cache.
pub const NUM_BLOCKS: usize = 9;
/// Blocks of the host cache, where there is one.
pub const NUM_SWAP_BLOCKS: usize = 5;
const NUM_LAYERS: usize = 3;
const HEADS: usize = 2;
const HEAD_DIM: usize = 16;
/// Contents that a block can be given.
const CONTENTS: usize = NUM_BLOCKS;

/// A model that computes nothing: its runner is there to move blocks.
pub struct Idle(ModelInfo);

impl<B: Backend> Model<B> for Idle {
    fn info(&self) -> &ModelInfo {
        &self.0
    }

    fn forward(&mut self, _: &mut B, _: &mut B::KvCache) {}

    fn logits(&mut self, _: &mut B, rows: Range<usize>) -> &mut B::Tensor {
        unreachable!("nobody wants logits, here of rows {rows:?}")
    }
}

/// Bytes of a block.
pub fn block_bytes(block_size: usize, dtype: DType) -> usize {
    2 * NUM_LAYERS * HEADS * HEAD_DIM * dtype.size() * block_size
}

/// A runner, and data to write into its blocks.
pub struct World<B: Backend> {
    /// The runner, which moves blocks.
    pub runner: ModelRunner<B, Idle>,
    block_size: usize,
    /// Rows of random queries, keys and values.
    qkv: B::Tensor,
    q: B::Tensor,
    rope: Rope<B::Vector>,
}

impl<B: Backend<KvCache: Poison, HostCache: Poison>> World<B> {
    /// Pools of NaN.
    pub fn new(backend: B, block_size: usize, num_swap_blocks: usize) -> Self {
        let mut h = Harness::new(backend);
        let layout = KvLayout {
            num_layers: NUM_LAYERS,
            num_blocks: NUM_BLOCKS,
            block_size,
            num_kv_heads: HEADS,
            head_dim: HEAD_DIM,
            dtype: h.dtype(),
        };
        let (rows, cols) = (block_size + CONTENTS + NUM_LAYERS, 3 * HEADS * HEAD_DIM);
        let qkv = h.f32_tensor(&Rows::new(Rng::new(9).floats(rows * cols, 2.0), cols));
        let q = h.tensor(rows, HEADS * HEAD_DIM, TensorKind::Compute);
        let rope = Rope { cos: h.vector(&[]), sin: h.vector(&[]), rot_dim: 0, interleaved: false };
        let model = Idle(model_info(&TinyModel::new(1).spec));
        let sizes = RunnerSizes {
            layout,
            num_swap_blocks,
            max_tokens: block_size,
            max_seqs: 1,
            max_positions: block_size,
            max_logprobs: 1,
        };
        let mut runner = ModelRunner::new(h.backend, model, sizes).expect("the backend works");
        let (_, kv, host) = runner.parts_mut();
        kv.poison();
        host.poison();
        World { runner, block_size, qkv, q, rope }
    }

    /// Writes rows `content..` to a block; each layer begins one row further on.
    pub fn write(&mut self, block: usize, content: usize) {
        let rows = self.block_size + CONTENTS + NUM_LAYERS;
        let (backend, kv, _) = self.runner.parts_mut();
        for layer in 0..NUM_LAYERS {
            let first = content + layer;
            let mut slots = vec![-1; rows];
            for (offset, slot) in slots[first..][..self.block_size].iter_mut().enumerate() {
                *slot = (block * self.block_size + offset) as i64;
            }
            let input = ForwardInput {
                token_ids: vec![0; rows],
                positions: vec![0; rows],
                slot_mapping: slots,
                query_start_loc: vec![0, rows as i32],
                seq_lens: vec![rows as i32],
                ..Default::default()
            };
            backend.begin_step(&input).expect("the backend works");
            let (q_norm, k_norm) = (None, None);
            let rope = &self.rope;
            let args = QkvArgs { layer, num_heads: HEADS, q_norm, k_norm, eps: 0.0, rope };
            backend.qk_norm_rope_write_kv(&self.qkv, &args, kv, &mut self.q);
        }
    }

    /// The bits of every block of both pools.
    pub fn contents(&mut self) -> Pools {
        let swap_blocks = self.runner.num_swap_blocks() as u32;
        let (_, kv, host) = self.runner.parts_mut();
        // Looking at the host waits for copies alone, so that those that did not wait for a kernel
        // show; looking at the device waits for all.
        let host = (0..swap_blocks).map(|block| host.block_bits(block)).collect();
        let device = (0..NUM_BLOCKS as u32).map(|block| kv.block_bits(block)).collect();
        Pools { device, host }
    }
}

/// The bits of every block.
#[derive(Clone, PartialEq)]
pub struct Pools {
    /// Of the KV cache.
    pub device: Vec<Vec<u32>>,
    /// Of the host cache.
    pub host: Vec<Vec<u32>>,
}

impl Pools {
    /// What the transfers should do.
    fn transfer(&mut self, transfers: &BlockTransfers) {
        for &(from, to) in &transfers.swap_out {
            self.host[to as usize] = self.device[from as usize].clone();
        }
        for &(from, to) in &transfers.swap_in {
            self.device[to as usize] = self.host[from as usize].clone();
        }
        for &(from, to) in &transfers.copies {
            self.device[to as usize] = self.device[from as usize].clone();
        }
    }
}

fn shuffled(num_blocks: usize, rng: &mut Rng) -> Vec<u32> {
    let mut blocks: Vec<u32> = (0..num_blocks as u32).collect();
    rng.shuffle(&mut blocks);
    blocks
}

/// Lists of any length. Their blocks overlap as much as they may.
fn random_transfers(rng: &mut Rng) -> BlockTransfers {
    let mut swap = |sources: usize, destinations: usize| -> Vec<(u32, u32)> {
        let mut to = shuffled(destinations, rng);
        to.truncate(rng.below(destinations + 1));
        to.into_iter().map(|to| (rng.below(sources) as u32, to)).collect()
    };
    let swap_out = swap(NUM_BLOCKS, NUM_SWAP_BLOCKS);
    let swap_in = swap(NUM_SWAP_BLOCKS, NUM_BLOCKS);
    let mut sources = shuffled(NUM_BLOCKS, rng);
    let to = sources.split_off(1 + rng.below(NUM_BLOCKS));
    let copies = to.into_iter().map(|to| (sources[rng.below(sources.len())], to)).collect();
    BlockTransfers { swap_out, swap_in, copies }
}

/// Random copies, swaps and writes on a backend. The pools are looked at now and then only: looking
/// waits for the device, and so would hide that something else does not.
pub fn check<B: Backend<KvCache: Poison, HostCache: Poison>>(
    name: &str,
    backend: B,
    block_size: usize,
) {
    let what = format!("{name}, block size {block_size}");
    let mut rng = Rng::named(1, &what);
    let mut world = World::new(backend, block_size, NUM_SWAP_BLOCKS);
    (0..NUM_BLOCKS).for_each(|block| world.write(block, block));
    let mut want = world.contents();
    let written = want.device.clone();
    let distinct: std::collections::HashSet<_> = written.iter().collect();
    assert_eq!(distinct.len(), CONTENTS, "{what}: contents are different");
    for round in 0..20 {
        let transfers = random_transfers(&mut rng);
        world.runner.transfer(&transfers).expect("a transfer");
        want.transfer(&transfers);
        if rng.below(3) == 0 {
            assert!(world.contents() == want, "{what}, round {round}: {transfers:?}");
        }
        let (block, content) = (rng.below(NUM_BLOCKS), rng.below(CONTENTS));
        world.write(block, content);
        want.device[block].clone_from(&written[content]);
        if rng.below(3) == 0 || round == 19 {
            assert!(world.contents() == want, "{what}, round {round}: a write to {block}");
        }
    }
}

/// A block leaves, its place is taken by one that comes back, and that one is forked, in one step.
pub fn check_order<B: Backend<KvCache: Poison, HostCache: Poison>>(backend: B) {
    let mut world = World::new(backend, 16, NUM_SWAP_BLOCKS);
    (0..NUM_BLOCKS).for_each(|block| world.write(block, block));
    let before = world.contents();
    let first = BlockTransfers { swap_out: vec![(7, 0)], ..Default::default() };
    world.runner.transfer(&first).expect("a transfer");
    let transfers = BlockTransfers {
        swap_out: vec![(2, 3)],
        swap_in: vec![(0, 2), (3, 4)],
        copies: vec![(2, 5), (2, 6), (4, 0)],
    };
    world.runner.transfer(&transfers).expect("a transfer");
    let after = world.contents();
    let expected = [2, 1, 7, 3, 2, 7, 7, 7, 8];
    for (block, content) in expected.into_iter().enumerate() {
        assert!(after.device[block] == before.device[content], "block {block}");
    }
    assert!(after.host[3] == before.device[2]);
}

/// A runner without a host cache.
pub fn check_without_swap_space<B: Backend<KvCache: Poison, HostCache: Poison>>(backend: B) {
    let mut world = World::new(backend, 8, 0);
    world.write(3, 1);
    let copies = vec![(3, 4)];
    let transfers = BlockTransfers { copies, ..Default::default() };
    world.runner.transfer(&transfers).expect("a transfer");
    let contents = world.contents();
    assert!(contents.device[3] == contents.device[4] && contents.host.is_empty());
    assert_eq!(world.runner.num_swap_blocks(), 0);
}
