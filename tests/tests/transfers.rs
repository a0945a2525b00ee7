//! Block transfers: after any sequence of copies and swaps, every block of both pools holds what a
//! model of their contents says, bit for bit, on every backend, dtype and block size.

use quire_engine::DType;
use quire_engine::backend::{CpuBackend, ReferenceBackend};
use quire_engine::model::{Model, ModelInfo};
use quire_engine::ops::{
    Backend, BackendError, BlockTransfers, ForwardInput, KvLayout, QkvArgs, Rope, TensorKind,
};
use quire_engine::runner::{Executor, ModelRunner};
use quire_model_zoo::decoder::model_info;
use quire_tests::fixtures::{Poison, TinyModel, every_path};
use quire_tests::harness::{Harness, Rows};
use quire_tests::rng::Rng;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

const NUM_BLOCKS: usize = 9;
const NUM_SWAP_BLOCKS: usize = 5;
const NUM_LAYERS: usize = 3;
const HEADS: usize = 2;
const HEAD_DIM: usize = 16;
/// Contents that a block can be given.
const CONTENTS: usize = 40;

/// A model that computes nothing: its runner is there to move blocks.
struct Idle(ModelInfo);

impl<B: Backend> Model<B> for Idle {
    fn info(&self) -> &ModelInfo {
        &self.0
    }

    fn forward(&mut self, _: &mut B, _: &mut B::KvCache) {}

    fn logits(&mut self, _: &mut B, rows: Range<usize>) -> &mut B::Tensor {
        unreachable!("nobody wants logits, here of rows {rows:?}")
    }
}

/// A runner, and data to write into its blocks.
struct World<B: Backend> {
    runner: ModelRunner<B, Idle>,
    block_size: usize,
    /// Rows of random queries, keys and values.
    qkv: B::Tensor,
    q: B::Tensor,
    rope: Rope<B::Vector>,
}

impl<B: Backend<KvCache: Poison, HostCache: Poison>> World<B> {
    fn new(backend: B, block_size: usize, num_swap_blocks: usize) -> Self {
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
        let mut runner = ModelRunner::new(h.backend, model, layout, num_swap_blocks).unwrap();
        let (_, kv, host) = runner.parts_mut();
        kv.poison();
        host.poison();
        World { runner, block_size, qkv, q, rope }
    }

    /// Writes rows `content..` to a block; each layer begins one row further on.
    fn write(&mut self, block: usize, content: usize) {
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
            backend.begin_step(&input).unwrap();
            let (q_norm, k_norm) = (None, None);
            let rope = &self.rope;
            let args = QkvArgs { layer, num_heads: HEADS, q_norm, k_norm, eps: 0.0, rope };
            backend.qk_norm_rope_write_kv(&self.qkv, &args, kv, &mut self.q);
        }
    }

    /// The bits of every block of both pools.
    fn contents(&mut self) -> Pools {
        let swap_blocks = self.runner.num_swap_blocks() as u32;
        let (_, kv, host) = self.runner.parts_mut();
        Pools {
            device: (0..NUM_BLOCKS as u32).map(|block| kv.block_bits(block)).collect(),
            host: (0..swap_blocks).map(|block| host.block_bits(block)).collect(),
        }
    }
}

/// The bits of every block.
#[derive(Clone, PartialEq)]
struct Pools {
    device: Vec<Vec<u32>>,
    host: Vec<Vec<u32>>,
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

fn check<B: Backend<KvCache: Poison, HostCache: Poison>>(
    name: &str,
    backend: B,
    block_size: usize,
) {
    let what = format!("{name}, block size {block_size}");
    let mut rng = Rng::named(1, &what);
    let mut world = World::new(backend, block_size, NUM_SWAP_BLOCKS);
    (0..NUM_BLOCKS).for_each(|block| world.write(block, block));
    let mut want = world.contents();
    let distinct: std::collections::HashSet<_> = want.device.iter().collect();
    assert_eq!(distinct.len(), NUM_BLOCKS, "{what}: blocks start out different");
    for round in 0..20 {
        let transfers = random_transfers(&mut rng);
        world.runner.transfer(&transfers).unwrap();
        want.transfer(&transfers);
        assert!(world.contents() == want, "{what}, round {round}: {transfers:?}");
        let block = rng.below(NUM_BLOCKS);
        world.write(block, rng.below(CONTENTS));
        let got = world.contents();
        want.device[block].clone_from(&got.device[block]);
        assert!(got == want, "{what}, round {round}: a write to {block}");
    }
}

#[test]
fn transfers_do_what_a_model_of_the_pools_says() {
    for block_size in [8, 16, 32, 64] {
        for dtype in [DType::F32, DType::Bf16] {
            check(&format!("reference {dtype}"), ReferenceBackend::new(dtype), block_size);
        }
        for (isa, dtype) in every_path() {
            for threads in [1, 3] {
                let backend = CpuBackend::new(dtype, Some(isa), Some(threads)).unwrap();
                check(&format!("{isa} {dtype} {threads} threads"), backend, block_size);
            }
        }
    }
}

/// A block leaves, its place is taken by one that comes back, and that one is forked, in one step.
#[test]
fn the_lists_are_carried_out_in_order() {
    let backend = CpuBackend::new(DType::Bf16, None, Some(2)).unwrap();
    let mut world = World::new(backend, 16, NUM_SWAP_BLOCKS);
    (0..NUM_BLOCKS).for_each(|block| world.write(block, block));
    let before = world.contents();
    let first = BlockTransfers { swap_out: vec![(7, 0)], ..Default::default() };
    world.runner.transfer(&first).unwrap();
    let transfers = BlockTransfers {
        swap_out: vec![(2, 3)],
        swap_in: vec![(0, 2), (3, 4)],
        copies: vec![(2, 5), (2, 6), (4, 0)],
    };
    world.runner.transfer(&transfers).unwrap();
    let after = world.contents();
    let expected = [2, 1, 7, 3, 2, 7, 7, 7, 8];
    for (block, content) in expected.into_iter().enumerate() {
        assert!(after.device[block] == before.device[content], "block {block}");
    }
    assert!(after.host[3] == before.device[2]);
}

#[test]
fn a_runner_without_swap_space_copies_blocks() {
    fn check<B: Backend<KvCache: Poison, HostCache: Poison>>(backend: B) {
        let mut world = World::new(backend, 8, 0);
        world.write(3, 1);
        let copies = vec![(3, 4)];
        world.runner.transfer(&BlockTransfers { copies, ..Default::default() }).unwrap();
        let contents = world.contents();
        assert!(contents.device[3] == contents.device[4] && contents.host.is_empty());
        assert_eq!(world.runner.num_swap_blocks(), 0);
    }
    check(ReferenceBackend::new(DType::F32));
    check(CpuBackend::new(DType::F32, None, Some(2)).unwrap());
}

#[test]
fn a_host_cache_that_does_not_fit_is_an_error() {
    let mut backend = CpuBackend::new(DType::F32, None, Some(1)).unwrap();
    let (num_layers, block_size, num_kv_heads, head_dim) = (64, 256, 64, 256);
    let dtype = DType::F32;
    let layout = KvLayout { num_layers, num_blocks: 1, block_size, num_kv_heads, head_dim, dtype };
    let error = backend.host_cache(&layout, i32::MAX as usize).err().unwrap();
    let BackendError::OutOfMemory { what, bytes } = error else { panic!("{error}") };
    assert_eq!(what, "the swapped-out KV blocks");
    assert_eq!(bytes, layout.block_bytes().unwrap() * i32::MAX as usize);
}

/// Whether `f` panics.
fn panics(f: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(f)).is_err()
}

#[test]
fn transfers_that_break_their_promises_are_refused() {
    let lists = |swap_out: &[(u32, u32)], swap_in: &[(u32, u32)], copies: &[(u32, u32)]| {
        let (swap_out, swap_in, copies) = (swap_out.to_vec(), swap_in.to_vec(), copies.to_vec());
        let transfers = BlockTransfers { swap_out, swap_in, copies };
        panics(|| transfers.check(4, 2))
    };
    assert!(!lists(&[], &[], &[]));
    // A source may be used twice, and lists may overlap each other.
    assert!(!lists(&[(3, 0), (3, 1)], &[(0, 3), (0, 2)], &[(3, 0), (3, 1)]));
    assert!(lists(&[(4, 0)], &[], &[]), "source out of range");
    assert!(lists(&[(0, 2)], &[], &[]), "destination out of range");
    assert!(lists(&[], &[(2, 0)], &[]), "source out of range");
    assert!(lists(&[], &[(0, 4)], &[]), "destination out of range");
    assert!(lists(&[], &[], &[(0, 4)]), "destination out of range");
    assert!(lists(&[(1, 0), (2, 0)], &[], &[]), "two copies over one block");
    assert!(lists(&[], &[(0, 3), (1, 3)], &[]), "two copies over one block");
    assert!(lists(&[], &[], &[(0, 3), (1, 3)]), "two copies over one block");
    assert!(lists(&[], &[], &[(0, 1), (1, 2)]), "a destination is a source");
    assert!(lists(&[], &[], &[(1, 1)]), "a destination is a source");
}

#[test]
fn only_the_first_blocks_of_a_table_may_be_missing() {
    // Tokens 17 to 19 of a sequence, in blocks of 8: the first two blocks may be freed.
    let refused = |table: &[i32]| {
        let input = ForwardInput {
            token_ids: vec![0; 3],
            positions: vec![17, 18, 19],
            slot_mapping: vec![9, 10, 11],
            query_start_loc: vec![0, 3],
            seq_lens: vec![20],
            block_table: table.to_vec(),
            max_blocks: table.len(),
            logits_indices: vec![2],
        };
        panics(|| input.check(8, 6))
    };
    for table in [[5, 4, 1, -1], [-1, 4, 1, -1], [-1, -1, 1, -1]] {
        assert!(!refused(&table), "{table:?}");
    }
    for table in [[5, -1, 1, -1], [-1, -1, -1, -1], [5, 4, -1, -1], [5, 6, 1, -1], [-2, 4, 1, -1]] {
        assert!(refused(&table), "{table:?}");
    }
}
