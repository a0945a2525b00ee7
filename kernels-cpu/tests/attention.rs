//! Paged attention against f64, and its bits under every way of cutting the work.

mod common;

use common::{assert_close, contexts, random, round, values};
use quire_kernels_cpu::{
    AttnArgs, AttnScratch, AttnScratchShape, Ctx, Dtype, Isa, KvCache, KvShape, QkvArgs, attention,
    qk_norm_rope_write_kv,
};

const KV_HEADS: usize = 2;
/// Slots of a cache, more than any test fills.
const SLOTS: usize = 3328;

/// What does not change from step to step.
#[derive(Clone, Copy, Debug)]
struct Model {
    dtype: Dtype,
    head_dim: usize,
    group: usize,
    window: Option<u32>,
    softcap: Option<f32>,
}

impl Model {
    fn q_heads(&self) -> usize {
        KV_HEADS * self.group
    }

    fn row(&self) -> usize {
        (self.q_heads() + 2 * KV_HEADS) * self.head_dim
    }

    fn scale(&self) -> f32 {
        // Large enough that the softmax is far from uniform.
        3.0 / (self.head_dim as f32).sqrt()
    }
}

/// A sequence: the Q, K and V of all its tokens, and its blocks.
#[derive(Clone)]
struct Sequence {
    qkv: Vec<f32>,
    blocks: Vec<i32>,
}

/// A poisoned cache and the sequences in it.
struct World<'a> {
    ctx: &'a Ctx,
    model: Model,
    block_size: usize,
    kv: KvCache,
    scratch: AttnScratch,
}

/// A step whose keys and values are in the cache.
struct Batch {
    q: Vec<u32>,
    starts: Vec<i32>,
    lens: Vec<i32>,
    table: Vec<i32>,
    max_blocks: usize,
}

impl<'a> World<'a> {
    fn new(ctx: &'a Ctx, model: Model, block_size: usize) -> Self {
        let shape = KvShape {
            layers: 2,
            num_blocks: SLOTS / block_size,
            block_size,
            kv_heads: KV_HEADS,
            head_dim: model.head_dim,
            dtype: model.dtype,
        };
        let mut kv = KvCache::new(shape).unwrap();
        kv.fill(u32::MAX);
        let mut scratch = AttnScratch::default();
        let shape = AttnScratchShape {
            seqs: 4,
            positions: SLOTS,
            q_heads: model.q_heads(),
            kv_heads: KV_HEADS,
            head_dim: model.head_dim,
        };
        scratch.reserve(&shape).unwrap();
        assert_eq!(shape.bytes(), Some(scratch.bytes()));
        Self { ctx, model, block_size, kv, scratch }
    }

    /// The same without room to share a token among workers.
    fn plain(self) -> Self {
        Self { scratch: AttnScratch::default(), ..self }
    }

    /// A sequence of `len` tokens that owns every third block from `first` on, in reverse.
    fn sequence(&self, seed: u64, len: usize, first: usize) -> Sequence {
        let blocks = len.div_ceil(self.block_size);
        let blocks = (0..blocks).rev().map(|i| (first + 3 * i) as i32).collect();
        Sequence { qkv: random(seed, len * self.model.row()), blocks }
    }

    /// Runs one step: each part is a sequence and the tokens of it to process. Returns the
    /// outputs of all tokens, words.
    fn step(&mut self, parts: &[(&Sequence, std::ops::Range<usize>)]) -> Vec<u32> {
        let batch = self.write(parts);
        let model = self.model;
        let args = AttnArgs {
            q: &batch.q,
            q_heads: model.q_heads(),
            layer: 1,
            query_start_loc: &batch.starts,
            seq_lens: &batch.lens,
            block_table: &batch.table,
            max_blocks: batch.max_blocks,
            scale: model.scale(),
            window: model.window,
            softcap: model.softcap,
        };
        let mut out = vec![u32::MAX; batch.q.len()];
        attention(self.ctx, &args, &self.kv, &mut self.scratch, &mut out);
        out
    }

    /// Writes the keys and values of a step's tokens.
    fn write(&mut self, parts: &[(&Sequence, std::ops::Range<usize>)]) -> Batch {
        let (model, row) = (self.model, self.model.row());
        let (mut qkv, mut slots) = (Vec::new(), Vec::new());
        let (mut starts, mut lens) = (vec![0], Vec::new());
        let max_blocks = parts.iter().map(|(s, _)| s.blocks.len()).max().unwrap();
        let mut table = Vec::new();
        for (seq, tokens) in parts {
            qkv.extend_from_slice(&seq.qkv[tokens.start * row..tokens.end * row]);
            slots.extend(tokens.clone().map(|t| {
                let block = seq.blocks[t / self.block_size] as usize;
                (block * self.block_size + t % self.block_size) as i64
            }));
            starts.push(slots.len() as i32);
            lens.push(tokens.end as i32);
            let needed = tokens.end.div_ceil(self.block_size);
            let mut row: Vec<i32> = seq.blocks[..needed].to_vec();
            if let Some(window) = model.window {
                // Blocks that have left the window of every token are gone.
                let gone = (tokens.start + 1).saturating_sub(window as usize) / self.block_size;
                row[..gone].fill(-1);
            }
            row.resize(max_blocks, -1);
            table.extend(row);
        }
        let positions = vec![0; slots.len()];
        let args = QkvArgs {
            qkv: &qkv,
            positions: &positions,
            slots: &slots,
            q_heads: model.q_heads(),
            q_norm: None,
            k_norm: None,
            eps: 0.0,
            cos: &[],
            sin: &[],
            rot_dim: 0,
            interleaved: false,
            layer: 1,
        };
        let len = slots.len() * model.q_heads() * model.dtype.words(model.head_dim);
        let mut q = vec![0; len];
        qk_norm_rope_write_kv(self.ctx, &args, &mut self.kv, &mut q);
        Batch { q, starts, lens, table, max_blocks }
    }

    /// The outputs of a sequence processed alone, in chunks that end at `ends`.
    fn run(&mut self, seq: &Sequence, ends: &[usize]) -> Vec<u32> {
        let starts = std::iter::once(0).chain(ends.iter().copied());
        starts.zip(ends).flat_map(|(start, &end)| self.step(&[(seq, start..end)])).collect()
    }
}

/// The exact outputs of `token`, all heads.
fn reference(model: Model, seq: &Sequence, token: usize) -> Vec<f64> {
    let (d, row) = (model.head_dim, model.row());
    let at = |token: usize, head: usize, i: usize| {
        f64::from(round(model.dtype, seq.qkv[token * row + head * d + i]))
    };
    let first = model.window.map_or(0, |w| (token + 1).saturating_sub(w as usize));
    let mut out = Vec::new();
    for head in 0..model.q_heads() {
        let kv_head = head / model.group;
        let (k, v) = (model.q_heads() + kv_head, model.q_heads() + KV_HEADS + kv_head);
        let mut scores = Vec::new();
        for key in first..=token {
            let dot: f64 = (0..d).map(|i| at(token, head, i) * at(key, k, i)).sum();
            let score = dot * f64::from(model.scale());
            scores.push(
                model.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh()),
            );
        }
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let probs: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = probs.iter().sum();
        for i in 0..d {
            let weighted = probs.iter().enumerate().map(|(j, p)| p * at(first + j, v, i));
            out.push(weighted.sum::<f64>() / sum);
        }
    }
    out
}

const LENGTHS: [usize; 8] = [1, 15, 16, 17, 255, 256, 257, 600];

/// Cases that together cover every length with every head dimension, and each of the other
/// choices many times.
fn cases() -> impl Iterator<Item = (Model, usize, usize)> {
    let mut case = 0;
    [16, 64, 80, 96, 128, 256].into_iter().flat_map(move |head_dim| {
        LENGTHS.map(|len| {
            case += 1;
            let model = Model {
                dtype: [Dtype::Bf16, Dtype::F32][case % 2],
                head_dim,
                group: [1, 3, 4, 7, 8][case % 5],
                window: [None, Some(40), None, Some(300), Some(1), Some(16), None][case % 7],
                softcap: [None, None, Some(2.0)][case % 3],
            };
            (model, len, [8, 16, 32, 64][case / 2 % 4])
        })
    })
}

#[test]
fn outputs_match_f64_on_every_path() {
    let contexts = contexts(2);
    for (model, len, block_size) in cases() {
        for dtype in [Dtype::Bf16, Dtype::F32] {
            let model = Model { dtype, ..model };
            let mut tokens = vec![0, len / 2, len * 2 / 3, len - 1];
            tokens.dedup();
            let mut want: Option<Vec<Vec<f64>>> = None;
            for ctx in &contexts {
                let mut world = World::new(ctx, model, block_size);
                let seq = world.sequence(1, len, 2);
                let out = values(dtype, &world.run(&seq, &[len]), model.head_dim);
                let want = want.get_or_insert_with(|| {
                    tokens.iter().map(|&t| reference(model, &seq, t)).collect()
                });
                let row = model.q_heads() * model.head_dim;
                for (&token, want) in tokens.iter().zip(want.iter()) {
                    let tolerance = if dtype == Dtype::F32 { 3e-6 } else { 8e-3 };
                    let what = format!("{} {model:?} block {block_size}, token {token}", ctx.isa);
                    let got = &out[token * row..][..row];
                    assert_close(got, want, |_| tolerance, &what);
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_chunks_blocks_or_threads() {
    for isa in Isa::available() {
        let (one, two) = (Ctx::new(isa, 1).unwrap(), Ctx::new(isa, 2).unwrap());
        for (model, len, block_size) in cases().filter(|case| case.1 > 16) {
            let base = World::new(&two, model, block_size);
            let whole = base.sequence(1, len, 0);
            drop(base);
            let run = |ctx: &Ctx, block_size: usize, ends: &[usize]| {
                let mut world = World::new(ctx, model, block_size);
                let seq = Sequence { qkv: whole.qkv.clone(), ..world.sequence(1, len, 5) };
                world.run(&seq, ends)
            };
            let want = run(&two, block_size, &[len]);
            let what = format!("{isa} {model:?} of {len} tokens");
            assert!(run(&one, block_size, &[len]) == want, "{what}: threads");
            for other in [8, 64] {
                assert!(run(&two, other, &[len]) == want, "{what}: block {other}");
            }
            let thirds = [len / 3, len / 3 + 1, len / 3 + 8, len - 2, len - 1, len];
            assert!(run(&two, block_size, &thirds) == want, "{what}: chunks");
            if len == 17 || (len == 255 && model.head_dim == 64) {
                let each: Vec<usize> = (1..=len).collect();
                assert!(run(&two, 8, &each) == want, "{what}: token by token");
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_batch() {
    for ctx in contexts(2) {
        for (model, ..) in cases().filter(|case| case.1 == 257) {
            let lens = [300, 17, 40, 1];
            let mut batch = World::new(&ctx, model, 16);
            let seqs: Vec<Sequence> = lens
                .iter()
                .enumerate()
                .map(|(i, &len)| batch.sequence(i as u64 + 1, len, 60 * i + i % 3))
                .collect();
            // One decodes, one prefills its last part, one is new, one has a single token.
            batch.step(&[(&seqs[0], 0..299)]);
            batch.step(&[(&seqs[1], 0..5)]);
            let parts =
                [(&seqs[0], 299..300), (&seqs[1], 5..17), (&seqs[2], 0..40), (&seqs[3], 0..1)];
            let together = batch.step(&parts);
            let mut at = 0;
            for (seq, tokens) in parts {
                let mut alone = World::new(&ctx, model, 16);
                let ends = if tokens.start > 0 {
                    vec![tokens.start, tokens.end]
                } else {
                    vec![tokens.end]
                };
                let want = alone.run(seq, &ends);
                let row = model.q_heads() * model.dtype.words(model.head_dim);
                let want = &want[tokens.start * row..];
                assert!(together[at..at + want.len()] == *want, "{} {model:?}", ctx.isa);
                at += want.len();
            }
            assert_eq!(at, together.len());
        }
    }
}

/// A token whose keys are shared by workers has the bits of one that a single worker computes.
#[test]
fn bits_do_not_depend_on_how_keys_are_cut() {
    for isa in Isa::available() {
        let contexts = [1, 2, 3, 16].map(|threads| Ctx::new(isa, threads).unwrap());
        for (case, window) in [None, Some(300), Some(1), None, Some(700)].into_iter().enumerate() {
            let model = Model {
                dtype: [Dtype::Bf16, Dtype::F32][case % 2],
                head_dim: [64, 128, 80, 256, 16][case],
                group: [3, 1, 8, 7, 60][case],
                window,
                softcap: [None, Some(2.0)][case % 2],
            };
            for len in [256, 257, 512, 770, 1100] {
                let mut plain = World::new(&contexts[0], model, 16).plain();
                let seq = plain.sequence(1, len, 0);
                let other = plain.sequence(2, 300, 1);
                // Two steps on the same scratch; the second has a long and a short sequence.
                let steps = |world: &mut World<'_>| {
                    world.write(&[(&seq, 0..len - 2), (&other, 0..299)]);
                    let alone = world.step(&[(&seq, len - 2..len - 1)]);
                    [alone, world.step(&[(&seq, len - 1..len), (&other, 299..300)])]
                };
                let want = steps(&mut plain);
                for ctx in &contexts {
                    let got = steps(&mut World::new(ctx, model, 16));
                    let threads = ctx.pool.threads();
                    assert!(got == want, "{isa} {model:?} of {len} tokens on {threads} threads");
                }
            }
        }
    }
}

/// A step that fails leaves nothing behind that harms the next.
#[test]
fn a_failed_step_leaves_the_scratch_usable() {
    let ctx = Ctx::new(Isa::detect(), 2).unwrap();
    let model = Model { dtype: Dtype::Bf16, head_dim: 64, group: 3, window: None, softcap: None };
    let mut world = World::new(&ctx, model, 16);
    let seq = world.sequence(1, 1100, 0);
    world.write(&[(&seq, 0..1099)]);
    let mut broken = seq.clone();
    broken.blocks[40] = -1;
    let step = std::panic::AssertUnwindSafe(|| world.step(&[(&broken, 1099..1100)]));
    assert!(std::panic::catch_unwind(step).is_err());
    let want = World::new(&ctx, model, 16).plain().run(&seq, &[1100]);
    let got = world.step(&[(&seq, 1099..1100)]);
    assert!(got == want[want.len() - got.len()..]);
}

#[test]
#[should_panic(expected = "block table entry -1 at position 16")]
fn a_missing_block_is_refused() {
    let ctx = Ctx::new(Isa::detect(), 2).unwrap();
    let model = Model { dtype: Dtype::F32, head_dim: 16, group: 1, window: None, softcap: None };
    let world = World::new(&ctx, model, 16);
    let args = AttnArgs {
        q: &[0; KV_HEADS * 16],
        q_heads: KV_HEADS,
        layer: 0,
        query_start_loc: &[0, 1],
        seq_lens: &[20],
        block_table: &[3, -1],
        max_blocks: 2,
        scale: 1.0,
        window: None,
        softcap: None,
    };
    attention(&ctx, &args, &world.kv, &mut AttnScratch::default(), &mut [0; KV_HEADS * 16]);
}
