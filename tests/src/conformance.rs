//! The cases of each op, and how far two backends may differ.
//!
//! Bounds follow from the arithmetic, not from observation. A sum of `k` products taken in f32 in
//! any order is off by at most `(k + 1) · 2⁻²⁴ · Σ|x·w|`; a value rounded to the dtype on both sides
//! of the comparison may differ by one unit in its last place. Products of bf16 values are exact in
//! f32, so one bound serves both dtypes.

use crate::fixtures::Poison;
use crate::harness::{Harness, Rows};
use crate::rng::Rng;
use quire_engine::DType;
use quire_engine::ops::{
    AttentionArgs, Backend, ForwardInput, KvLayout, MatrixLayout, QkvArgs, Rope, TensorKind,
};
use quire_engine::sampling::{SampleOutput, SamplingBatch, TokenLogprob};

/// Half the spacing of f32 at 1: the relative error of one operation.
const F32_ERROR: f32 = 1.0 / (1 << 24) as f32;

/// Spacing of the dtype's values at 1.
fn ulp(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 2.0 * F32_ERROR,
        DType::Bf16 => 1.0 / 128.0,
    }
}

/// Asserts `|got − want| ≤ bound(row, column, want)` everywhere.
pub fn assert_close(what: &str, got: &Rows, want: &Rows, bound: impl Fn(usize, usize, f32) -> f32) {
    assert_eq!((got.len(), got.cols), (want.len(), want.cols), "{what}: shape");
    for row in 0..want.len() {
        for (i, (&g, &w)) in got.row(row).iter().zip(want.row(row)).enumerate() {
            let bound = bound(row, i, w);
            assert!(
                (g - w).abs() <= bound,
                "{what}: row {row}, column {i}: {g} differs from {w} by more than {bound}"
            );
        }
    }
}

/// Asserts equal bits.
pub fn assert_bits(what: &str, got: &Rows, want: &Rows) {
    assert_eq!((got.len(), got.cols), (want.len(), want.cols), "{what}: shape");
    for row in 0..want.len() {
        for (i, (g, w)) in got.row(row).iter().zip(want.row(row)).enumerate() {
            assert_eq!(g.to_bits(), w.to_bits(), "{what}: row {row}, column {i}: {g} and {w}");
        }
    }
}

/// A matrix product: `x[rows, k]`, `w[n, k]`.
#[derive(Clone, Debug)]
pub struct GemmCase {
    /// Rows of x.
    pub rows: usize,
    /// Outputs; for the gated op the width of the MLP.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// With a bias.
    pub bias: bool,
    /// Of the data.
    pub seed: u64,
}

impl GemmCase {
    /// x, of values that the dtype holds.
    pub fn x(&self, dtype: DType) -> Rows {
        Rows::new(Rng::named(self.seed, "x").floats(self.rows * self.k, 2.0), self.k).rounded(dtype)
    }

    /// w with `n` rows.
    pub fn w(&self, n: usize, dtype: DType) -> Rows {
        Rows::new(Rng::named(self.seed, "w").floats(n * self.k, 1.0), self.k).rounded(dtype)
    }

    fn residual(&self) -> Rows {
        Rows::new(Rng::named(self.seed, "residual").floats(self.rows * self.n, 4.0), self.n)
    }

    fn bias(&self) -> Option<Vec<f32>> {
        self.bias.then(|| Rng::named(self.seed, "bias").floats(self.n, 3.0))
    }
}

/// `Σ|x·w|` of a row of x and a row of w.
fn magnitude(x: &[f32], w: &[f32]) -> f32 {
    x.iter().zip(w).map(|(x, w)| (x * w).abs()).sum()
}

/// `linear` on the given rows of x.
pub fn linear<B: Backend<KvCache: Poison>>(
    h: &mut Harness<B>,
    case: &GemmCase,
    rows: &[usize],
) -> Rows {
    let x = h.compute_tensor(&case.x(h.dtype()).select(rows.iter().copied()));
    let w = h.weight(MatrixLayout::Plain, &case.w(case.n, h.dtype()));
    let bias = case.bias().map(|b| h.vector(&b));
    let mut out = h.tensor(rows.len(), case.n, TensorKind::F32);
    h.backend.linear(&x, &w, bias.as_ref(), &mut out);
    h.read_f32(&out, rows.len(), case.n)
}

/// `linear_add` on the given rows of x and of a residual.
pub fn linear_add<B: Backend<KvCache: Poison>>(
    h: &mut Harness<B>,
    case: &GemmCase,
    rows: &[usize],
) -> Rows {
    let x = h.compute_tensor(&case.x(h.dtype()).select(rows.iter().copied()));
    let w = h.weight(MatrixLayout::Plain, &case.w(case.n, h.dtype()));
    let bias = case.bias().map(|b| h.vector(&b));
    let mut out = h.f32_tensor(&case.residual().select(rows.iter().copied()));
    h.backend.linear_add(&x, &w, bias.as_ref(), &mut out);
    h.read_f32(&out, rows.len(), case.n)
}

/// `gate_up_silu_mul` on the given rows of x.
pub fn gate_up<B: Backend<KvCache: Poison>>(
    h: &mut Harness<B>,
    case: &GemmCase,
    rows: &[usize],
) -> Rows {
    let x = h.compute_tensor(&case.x(h.dtype()).select(rows.iter().copied()));
    let w = h.weight(MatrixLayout::GateUp, &case.w(2 * case.n, h.dtype()));
    let mut out = h.tensor(rows.len(), case.n, TensorKind::Compute);
    h.backend.gate_up_silu_mul(&x, &w, &mut out);
    h.read_compute(&out, rows.len(), case.n)
}

/// Asserts that `got` is `want` as far as f32 sums allow; `add`: with the residual.
pub fn assert_linear(case: &GemmCase, dtype: DType, add: bool, got: &Rows, want: &Rows) {
    let (x, w) = (case.x(dtype), case.w(case.n, dtype));
    let (bias, residual) = (case.bias(), case.residual());
    assert_close("linear", got, want, |row, i, want| {
        let mut size = magnitude(x.row(row), w.row(i)) + want.abs();
        size += bias.as_ref().map_or(0.0, |b| b[i].abs());
        size += if add { residual.row(row)[i].abs() } else { 0.0 };
        (case.k + 4) as f32 * F32_ERROR * size
    });
}

/// Asserts that `got` is `want` as far as f32 sums and one rounding to the dtype allow.
pub fn assert_gate_up(case: &GemmCase, dtype: DType, got: &Rows, want: &Rows) {
    let (x, w) = (case.x(dtype), case.w(2 * case.n, dtype));
    assert_close("gate_up_silu_mul", got, want, |row, i, want| {
        let x = x.row(row);
        let dot = |w: &[f32]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f32>();
        let (gate, up) = (dot(w.row(i)), dot(w.row(case.n + i)));
        let error = |w: &[f32]| (case.k + 4) as f32 * F32_ERROR * magnitude(x, w);
        // |silu′| ≤ 1.1 and |silu(g)| ≤ |g|; exp and the division add a few units of f32.
        1.1 * error(w.row(i)) * up.abs()
            + gate.abs() * error(w.row(case.n + i))
            + (32.0 * F32_ERROR + ulp(dtype)) * want.abs()
            + f32::MIN_POSITIVE
    });
}

/// `rms_norm` of `x` with weights near 1.
pub fn rms_norm<B: Backend<KvCache: Poison>>(h: &mut Harness<B>, x: &Rows, eps: f32) -> Rows {
    let weight: Vec<f32> = Rng::named(7, "norm").floats(x.cols, 1.5);
    let input = h.f32_tensor(x);
    let weight = h.vector(&weight);
    let mut out = h.tensor(x.len(), x.cols, TensorKind::Compute);
    h.backend.rms_norm(&input, &weight, eps, &mut out);
    h.read_compute(&out, x.len(), x.cols)
}

/// Asserts that `got` is `want`: a sum of squares has no cancellation, so all errors are relative.
pub fn assert_rms_norm(dtype: DType, got: &Rows, want: &Rows) {
    let error = (want.cols + 16) as f32 * F32_ERROR + ulp(dtype);
    assert_close("rms_norm", got, want, |_, _, want| error * want.abs() + f32::MIN_POSITIVE);
}

/// Samples every row of `logits` by `batch`.
pub fn sample<B: Backend<KvCache: Poison>>(
    h: &mut Harness<B>,
    logits: &Rows,
    batch: &SamplingBatch,
) -> Vec<SampleOutput> {
    h.reserve_logits(logits.cols);
    let mut tensor = h.f32_tensor(logits);
    h.backend.sample(&mut tensor, batch, 0..logits.len()).expect("sampling works");
    h.backend.end_step().expect("sampling works");
    let mut out = Vec::new();
    h.backend.read_samples(&mut out).expect("sampling works");
    out
}

/// The CPU sums exponentials in f32, the kernels in fixed point.
const LOGPROB_ERROR: f32 = 2e-5;

/// Asserts the tokens and refusals of `want`, and its log-probabilities within their error.
pub fn assert_samples(got: &[SampleOutput], want: &[SampleOutput]) {
    assert_eq!(got.len(), want.len());
    let all = |output: &SampleOutput| -> Vec<TokenLogprob> {
        let all = output.logprobs.iter();
        all.flat_map(|l| std::iter::once(l.sampled).chain(l.top.iter().copied())).collect()
    };
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.token, want.token, "answer {i}");
        let (got, want) = (all(got), all(want));
        assert_eq!(got.len(), want.len(), "answer {i}");
        for (got, want) in got.iter().zip(&want) {
            let close =
                (got.logprob - want.logprob).abs() <= LOGPROB_ERROR || got.logprob == want.logprob;
            assert!(got.token == want.token && close, "answer {i}: {got:?} is not {want:?}");
        }
    }
}

/// Asserts the same token, or the same failure, and log-probabilities of the same tokens that differ
/// by at most `error`.
pub fn assert_sample(got: &SampleOutput, want: &SampleOutput, error: f32) {
    assert_eq!(got.token, want.token, "{got:?} and {want:?}");
    assert_eq!(got.logprobs.is_some(), want.logprobs.is_some(), "{got:?} and {want:?}");
    let all = |output: &SampleOutput| -> Vec<TokenLogprob> {
        let logprobs = output.logprobs.iter();
        logprobs.flat_map(|l| std::iter::once(&l.sampled).chain(&l.top)).copied().collect()
    };
    let (got, want) = (all(got), all(want));
    assert_eq!(got.len(), want.len(), "{got:?} and {want:?}");
    for (got, want) in got.iter().zip(&want) {
        assert_eq!(got.token, want.token, "{got:?} and {want:?}");
        let equal = got.logprob == want.logprob;
        assert!(equal || (got.logprob - want.logprob).abs() <= error, "{got:?} and {want:?}");
    }
}

/// Sequences that write their K and V and attend, chunk by chunk.
#[derive(Clone, Debug)]
pub struct AttentionCase {
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Query heads for each of them.
    pub group: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// Sliding window.
    pub window: Option<u32>,
    /// Rotated elements of a head.
    pub rot_dim: usize,
    /// Pairs (2i, 2i + 1).
    pub interleaved: bool,
    /// Normalise q and k heads.
    pub qk_norm: bool,
    /// For each sequence the lengths of its chunks; step `i` takes chunk `i` of those that have it.
    pub seqs: Vec<Vec<usize>>,
    /// Of the data.
    pub seed: u64,
    /// Of the order in which blocks are handed out.
    pub block_seed: u64,
}

/// Layers in the cache; only the last is used, the others stay NaN.
const LAYERS: usize = 2;

impl AttentionCase {
    fn num_heads(&self) -> usize {
        self.num_kv_heads * self.group
    }

    fn len(&self, seq: usize) -> usize {
        self.seqs[seq].iter().sum()
    }

    /// Row of queries, keys and values of a token; the same whatever else is in the case.
    fn qkv(&self, seq: usize, position: usize) -> Vec<f32> {
        let mut rng = Rng::named(self.seed, &format!("{seq} {position}"));
        rng.floats((self.num_heads() + 2 * self.num_kv_heads) * self.head_dim, 2.0)
    }

    fn rope<B: Backend<KvCache: Poison>>(&self, h: &mut Harness<B>) -> Rope<B::Vector> {
        let longest = (0..self.seqs.len()).map(|s| self.len(s)).max().unwrap_or(0);
        let half = self.rot_dim / 2;
        let angles = (0..longest * half).map(|i| {
            let (position, pair) = (i / half, i % half);
            position as f64 * 10_000f64.powf(-(pair as f64) / half as f64)
        });
        let (cos, sin): (Vec<f32>, Vec<f32>) =
            angles.map(|a| (a.cos() as f32, a.sin() as f32)).unzip();
        Rope {
            cos: h.vector(&cos),
            sin: h.vector(&sin),
            rot_dim: self.rot_dim,
            interleaved: self.interleaved,
        }
    }

    /// The blocks of `seqs`, in shuffled order.
    fn tables(&self, seqs: &[usize]) -> Tables {
        let blocks = |seq: usize| self.len(seq).div_ceil(self.block_size);
        let num_blocks = seqs.iter().map(|&s| blocks(s)).sum::<usize>() + 3;
        let mut ids: Vec<i32> = (0..num_blocks as i32).collect();
        Rng::new(self.block_seed).shuffle(&mut ids);
        let tables = seqs.iter().map(|&s| ids.split_off(ids.len() - blocks(s))).collect();
        Tables { tables, unused: ids, num_blocks }
    }

    fn kv_layout(&self, num_blocks: usize, dtype: DType) -> KvLayout {
        KvLayout {
            num_layers: LAYERS,
            num_blocks,
            block_size: self.block_size,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            dtype,
        }
    }

    /// The input of one step and, for each of its tokens, the sequence and position.
    fn step(
        &self,
        seqs: &[usize],
        tables: &[Vec<i32>],
        chunk: usize,
    ) -> (ForwardInput, Vec<(usize, usize)>) {
        let mut input = ForwardInput::default();
        // One column more than anyone needs: unused entries are never looked at.
        input.clear(tables.iter().map(Vec::len).max().unwrap_or(0) + 1);
        let mut owners = Vec::new();
        for (&seq, table) in seqs.iter().zip(tables) {
            let Some(&len) = self.seqs[seq].get(chunk) else { continue };
            let start: usize = self.seqs[seq][..chunk].iter().sum();
            for position in start..start + len {
                let block = table[position / self.block_size] as usize;
                let slot = block * self.block_size + position % self.block_size;
                input.token_ids.push(0);
                input.positions.push(position as u32);
                input.slot_mapping.push(slot as i64);
                owners.push((seq, position));
            }
            input.query_start_loc.push(owners.len() as i32);
            input.seq_lens.push((start + len) as i32);
            input.block_table.extend(table);
            input.block_table.resize(input.seq_lens.len() * input.max_blocks, -1);
        }
        (input, owners)
    }
}

/// Where the sequences of a case lie.
struct Tables {
    /// Blocks of each sequence.
    tables: Vec<Vec<i32>>,
    /// Blocks of none.
    unused: Vec<i32>,
    /// Size of the pool.
    num_blocks: usize,
}

impl Tables {
    /// Swaps every block of every sequence out, loses what the pool held, and swaps them in
    /// elsewhere.
    fn swap<B: Backend<KvCache: Poison>>(
        &mut self,
        h: &mut Harness<B>,
        layout: &KvLayout,
        kv: &mut B::KvCache,
    ) {
        let mut host = h.backend.host_cache(layout, self.num_blocks).expect("a small host cache");
        let mut places: Vec<u32> = (0..self.num_blocks as u32).collect();
        Rng::new(self.tables[0][0] as u64).shuffle(&mut places);
        let blocks = self.tables.iter().flatten().map(|&block| block as u32);
        let out: Vec<_> = blocks.map(|block| (block, places[block as usize])).collect();
        h.backend.swap_out(kv, &mut host, &out).expect("a swap");
        kv.poison();
        places.rotate_left(1);
        let back: Vec<_> = out.iter().map(|&(block, at)| (at, places[block as usize])).collect();
        h.backend.swap_in(kv, &mut host, &back).expect("a swap");
        let moved = |block: &mut i32| *block = places[*block as usize] as i32;
        self.tables.iter_mut().flatten().for_each(moved);
        self.unused.iter_mut().for_each(moved);
    }

    /// Overwrites the blocks with NaN that have left the windows of the step.
    fn free<B: Backend>(
        &self,
        h: &mut Harness<B>,
        case: &AttentionCase,
        kv: &mut B::KvCache,
        (input, null): (&mut ForwardInput, bool),
    ) {
        let Some(window) = case.window else { return };
        for seq in 0..input.num_seqs() {
            let start = input.positions[input.query_start_loc[seq] as usize];
            let freed = (start + 1).saturating_sub(window) as usize / case.block_size;
            let freed = &mut input.block_table[seq * input.max_blocks..][..freed];
            let nan = self.unused[0] as u32;
            let pairs: Vec<_> = freed.iter().map(|&block| (nan, block as u32)).collect();
            h.backend.copy_blocks(kv, &pairs).expect("a copy");
            if null {
                freed.fill(-1);
            }
        }
    }
}

/// What happens between writing and attending, none of which may change a bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meanwhile {
    /// Nothing.
    Nothing,
    /// Other data is given with slot −1 throughout.
    Rewrite,
    /// The blocks that have left the window are overwritten with NaN, and the table either still
    /// names them or is `null`, −1, there.
    Free {
        /// −1.
        null: bool,
    },
    /// All blocks are swapped out and come back into others.
    Swap,
}

/// Writes K and V of the given sequences and attends, over a cache that was NaN. One result for
/// each sequence, `[len, Hq·D]`.
pub fn attention<B: Backend<KvCache: Poison>>(
    h: &mut Harness<B>,
    case: &AttentionCase,
    seqs: &[usize],
    meanwhile: Meanwhile,
) -> Vec<Rows> {
    let mut tables = case.tables(seqs);
    let layout = case.kv_layout(tables.num_blocks, h.dtype());
    let mut kv = h.kv_cache(&layout, case.num_heads());
    kv.poison();
    let rope = case.rope(h);
    let norms = case.qk_norm.then(|| {
        let weights = |name| Rng::named(case.seed, name).floats(case.head_dim, 1.5);
        (h.vector(&weights("q norm")), h.vector(&weights("k norm")))
    });
    let (layer, num_heads) = (LAYERS - 1, case.num_heads());
    let width = num_heads * case.head_dim;
    let mut results: Vec<Vec<f32>> = vec![Vec::new(); case.seqs.len()];
    let steps = seqs.iter().map(|&s| case.seqs[s].len()).max().unwrap_or(0);
    for chunk in 0..steps {
        let (mut input, owners) = case.step(seqs, &tables.tables, chunk);
        let tokens = owners.len();
        let rows = owners.iter().flat_map(|&(seq, position)| case.qkv(seq, position)).collect();
        let rows = Rows::new(rows, width + 2 * case.num_kv_heads * case.head_dim);
        let mut q = h.tensor(tokens, width, TensorKind::Compute);
        let (q_norm, k_norm) = norms.as_ref().map(|(q, k)| (q, k)).unzip();
        let args = QkvArgs { layer, num_heads, q_norm, k_norm, eps: 1e-5, rope: &rope };
        let mut write = |h: &mut Harness<B>, values: &Rows, input: &ForwardInput| {
            let qkv = h.f32_tensor(values);
            h.begin(input);
            h.backend.qk_norm_rope_write_kv(&qkv, &args, &mut kv, &mut q);
        };
        write(h, &rows, &input);
        if meanwhile == Meanwhile::Rewrite {
            input.slot_mapping.fill(-1);
            let other = Rows::new(rows.data.iter().map(|x| -x).collect(), rows.cols);
            write(h, &other, &input);
            // The queries come last; what attention reads is what the first write left.
            write(h, &rows, &input);
        }
        if meanwhile == Meanwhile::Swap {
            tables.swap(h, &layout, &mut kv);
            input = case.step(seqs, &tables.tables, chunk).0;
        }
        if let Meanwhile::Free { null } = meanwhile {
            tables.free(h, case, &mut kv, (&mut input, null));
        }
        input.check(case.block_size, tables.num_blocks);
        h.begin(&input);
        let mut out = h.tensor(tokens, width, TensorKind::Compute);
        let scale = (case.head_dim as f32).sqrt().recip();
        let args = AttentionArgs { layer, num_heads, scale, window: case.window };
        h.backend.attention(&q, &args, &kv, &mut out);
        let out = h.read_compute(&out, tokens, width);
        for (row, &(seq, _)) in owners.iter().enumerate() {
            results[seq].extend_from_slice(out.row(row));
        }
    }
    seqs.iter().map(|&s| Rows::new(std::mem::take(&mut results[s]), width)).collect()
}

/// Asserts that `got` is `want`. |v| < 2, so an output is off by at most twice the error of its
/// weights: in bf16 each P and each output rounds by 2⁻⁹ on either side, and a q or k that lands on
/// the other side of a rounding boundary moves a score by 2⁻⁸ of one of its terms; in f32 scores of
/// size up to 16 carry an error of some 2⁻²⁰ and the sums as much again.
pub fn assert_attention(dtype: DType, got: &Rows, want: &Rows) {
    let bound = match dtype {
        DType::F32 => 2.0 * 1e-5,
        DType::Bf16 => 2.0 * 2.0 / 256.0,
    };
    assert_close("attention", got, want, |_, _, _| bound);
}
