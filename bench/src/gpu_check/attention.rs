//! Attention: one new row a sequence over contexts of many lengths, and whole prompts.

use super::ceilings::{COPY, PEAK};
use super::kit::{Device, Kit, Tensor};
use super::report::Figure;
use super::{EAGER, Run};
use crate::Random;
use half::bf16;
use quire_engine::DType;
use quire_engine::backend::cuda::CudaKvCache;
use quire_engine::ops::{
    AttentionArgs, Backend, ForwardInput, KvLayout, QkvArgs, Rope, TensorKind,
};
use serde_json::json;

/// Blocks that are filled with random numbers, to be copied to all others.
const FILLED_BLOCKS: usize = 64;
/// Blocks that are copied at a time.
const COPIED_BLOCKS: usize = 1 << 15;
/// Most layers that memory is spread over.
const MAX_LAYERS: usize = 64;
/// Bytes that other buffers may need.
const MARGIN: usize = 2 << 30;
/// Percent of the copy bandwidth that decode is to reach.
const DECODE_AIM: f64 = 85.0;
/// TFLOP/s that prefill is to reach on a Hopper.
const PREFILL_AIM: f64 = 300.0;
/// Tokens of a block, where it does not matter.
const BLOCK_SIZE: usize = 16;

/// A KV cache with something in it, and sequences of equal length over all of its blocks.
pub(super) struct Cache {
    pub kv: CudaKvCache<bf16>,
    pub layout: KvLayout,
    /// `[seqs, blocks of one]`, in random order.
    tables: Vec<i32>,
    blocks_per_seq: usize,
}

impl Cache {
    /// For `seqs` sequences of `context` tokens, in as many layers as no cache of the device holds.
    /// `None`: there is no room.
    pub fn new(
        run: &Run,
        kit: &mut Kit,
        (seqs, context, block_size): (usize, usize, usize),
    ) -> anyhow::Result<Option<Self>> {
        let sizes = &run.sizes.attention;
        let blocks_per_seq = context.div_ceil(block_size);
        let mut layout = KvLayout {
            num_layers: 1,
            num_blocks: seqs * blocks_per_seq,
            block_size,
            num_kv_heads: sizes.kv_heads,
            head_dim: sizes.head_dim,
            dtype: DType::Bf16,
        };
        let bytes = layout.block_bytes().expect("small sizes") * layout.num_blocks;
        layout.num_layers = run.sizes.spread.div_ceil(bytes).clamp(1, MAX_LAYERS);
        if !run.dry_run && bytes * layout.num_layers + MARGIN > run.free_bytes()? {
            return Ok(None);
        }
        let kv = kit.device.kv_cache(&layout)?;
        kit.reserve(block_size)?;
        let tables = Random::new(11).shuffled(layout.num_blocks);
        let mut cache = Cache { kv, layout, tables, blocks_per_seq };
        cache.fill(kit)?;
        Ok(Some(cache))
    }

    /// Random keys and values everywhere.
    fn fill(&mut self, kit: &mut Kit) -> anyhow::Result<()> {
        let KvLayout { num_layers, num_blocks, block_size, num_kv_heads, head_dim, .. } =
            self.layout;
        let filled = num_blocks.min(FILLED_BLOCKS);
        let rows = filled * block_size;
        let qkv = kit.floats(rows, (1 + 2 * num_kv_heads) * head_dim)?;
        let mut q = kit.device.tensor(rows, head_dim, TensorKind::Compute)?;
        let rope = Rope {
            cos: kit.device.vector(&vec![1.0; head_dim / 2])?,
            sin: kit.device.vector(&vec![0.0; head_dim / 2])?,
            rot_dim: head_dim,
            interleaved: false,
        };
        let mut input = quire_tests::harness::row_input(rows);
        input.token_ids.fill(0);
        input.positions.fill(0);
        input.slot_mapping = (0..rows as i64).collect();
        kit.begin(&input)?;
        for layer in 0..num_layers {
            let args =
                QkvArgs { layer, num_heads: 1, q_norm: None, k_norm: None, eps: 1e-5, rope: &rope };
            kit.device.qk_norm_rope_write_kv(&qkv, &args, &mut self.kv, &mut q);
        }
        let others: Vec<(u32, u32)> =
            (filled..num_blocks).map(|block| ((block % filled) as u32, block as u32)).collect();
        for pairs in others.chunks(COPIED_BLOCKS) {
            kit.device.copy_blocks(&mut self.kv, pairs)?;
        }
        Ok(kit.device.synchronize()?)
    }

    /// A step in which each of `seqs` sequences has `rows` new rows, the last of `context` tokens;
    /// sequences beyond those of the cache take the blocks of others.
    pub fn input(&self, seqs: usize, rows: usize, context: usize) -> ForwardInput {
        let mut input = ForwardInput::default();
        input.clear(self.blocks_per_seq);
        let tables: Vec<&[i32]> = self.tables.chunks_exact(self.blocks_per_seq).collect();
        for seq in 0..seqs {
            input.token_ids.extend(std::iter::repeat_n(0, rows));
            input.positions.extend((context - rows..context).map(|position| position as u32));
            input.slot_mapping.extend(std::iter::repeat_n(-1, rows));
            input.query_start_loc.push(input.token_ids.len() as i32);
            input.seq_lens.push(context as i32);
            input.block_table.extend(tables[seq % tables.len()]);
        }
        input
    }
}

/// Queries and what becomes of them.
pub(super) struct Queries {
    q: Tensor,
    out: Tensor,
    num_heads: usize,
    scale: f32,
}

impl Queries {
    /// `rows` random queries, `group` heads for each KV head of `layout`.
    pub fn new(
        kit: &mut Kit,
        layout: &KvLayout,
        rows: usize,
        group: usize,
    ) -> anyhow::Result<Self> {
        let num_heads = group * layout.num_kv_heads;
        let cols = num_heads * layout.head_dim;
        let q = kit.compute(rows, cols)?;
        let out = kit.device.tensor(rows, cols, TensorKind::Compute)?;
        Ok(Queries { q, out, num_heads, scale: (layout.head_dim as f32).sqrt().recip() })
    }

    /// Launches attention of the step that was begun.
    pub fn attend(&mut self, device: &mut Device, cache: &Cache, layer: usize) {
        let Queries { num_heads, scale, .. } = *self;
        let args = AttentionArgs { layer, num_heads, scale, window: None };
        device.attention(&self.q, &args, &cache.kv, &mut self.out);
    }
}

/// Milliseconds of attention of such a step.
pub(super) fn time(
    kit: &mut Kit,
    cache: &Cache,
    queries: &mut Queries,
    input: &ForwardInput,
) -> anyhow::Result<f64> {
    kit.begin(input)?;
    kit.time(|device, i| queries.attend(device, cache, i % cache.layout.num_layers))
}

/// Decode over all sizes, then prefill.
pub(super) fn run(run: &mut Run) -> anyhow::Result<()> {
    run.ceilings()?;
    let mut kit = Kit::new(EAGER, run.sizes, run.dry_run)?;
    let sizes = &run.sizes.attention;
    for &context in sizes.contexts {
        for &seqs in sizes.batches {
            let what = format!("decode, {seqs} × {context} keys");
            if run.has_time_for(&what) {
                decode(run, &mut kit, (seqs, context, BLOCK_SIZE), sizes.groups)?;
            }
        }
    }
    for &context in sizes.prefill {
        if run.has_time_for(&format!("prefill, {context} tokens")) {
            prefill(run, &mut kit, context)?;
        }
    }
    Ok(())
}

/// Decode over blocks of several sizes.
pub(super) fn block_sizes(run: &mut Run) -> anyhow::Result<()> {
    run.ceilings()?;
    let mut kit = Kit::new(EAGER, run.sizes, run.dry_run)?;
    let sizes = &run.sizes.attention;
    for &(seqs, context) in sizes.compared {
        for &block_size in sizes.block_sizes {
            let what = format!("blocks of {block_size}, {seqs} × {context} keys");
            if run.has_time_for(&what) {
                let groups = [sizes.prefill_group];
                decode(run, &mut kit, (seqs, context, block_size), &groups)?;
            }
        }
    }
    Ok(())
}

fn decode(
    run: &mut Run,
    kit: &mut Kit,
    (seqs, context, block_size): (usize, usize, usize),
    groups: &[usize],
) -> anyhow::Result<()> {
    let ceilings = run.ceilings()?;
    let Some(cache) = Cache::new(run, kit, (seqs, context, block_size))? else {
        run.leave_out(&format!("decode, {seqs} × {context} keys"), "no memory");
        return Ok(());
    };
    let KvLayout { num_kv_heads, head_dim, .. } = cache.layout;
    for &group in groups {
        let mut queries = Queries::new(kit, &cache.layout, seqs, group)?;
        let ms = time(kit, &cache, &mut queries, &cache.input(seqs, 1, context))?;
        let values = 2 * seqs * num_kv_heads * head_dim * (context + group);
        let params = json!({
            "batch": seqs, "keys": context, "group": group, "kv_heads": num_kv_heads,
            "head_dim": head_dim, "block": block_size,
        });
        let figure = Figure::new("decode", "GB/s", params)
            .ms(ms)
            .value((2 * values) as f64 / ms / 1e6)
            .ceiling(Some(ceilings.bytes_per_s / 1e9), COPY);
        run.figure(figure.aim_percent(DECODE_AIM));
    }
    Ok(())
}

fn prefill(run: &mut Run, kit: &mut Kit, context: usize) -> anyhow::Result<()> {
    let ceilings = run.ceilings()?;
    let Some(cache) = Cache::new(run, kit, (1, context, BLOCK_SIZE))? else {
        run.leave_out(&format!("prefill, {context} tokens"), "no memory");
        return Ok(());
    };
    let group = run.sizes.attention.prefill_group;
    let mut queries = Queries::new(kit, &cache.layout, context, group)?;
    let ms = time(kit, &cache, &mut queries, &cache.input(1, context, context))?;
    let pairs = context * (context + 1) / 2;
    let flops = (4 * pairs * queries.num_heads * cache.layout.head_dim) as f64;
    let params = json!({
        "tokens": context, "group": group, "kv_heads": cache.layout.num_kv_heads,
        "head_dim": cache.layout.head_dim,
    });
    let figure = Figure::new("prefill", "TFLOP/s", params).ms(ms).value(flops / ms / 1e9);
    let figure = figure.ceiling(Some(ceilings.flops_per_s / 1e12), PEAK);
    run.figure(figure.aim(PREFILL_AIM));
    Ok(())
}
