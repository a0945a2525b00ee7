//! `prefill_attention`, `decode_attention`, `fold_splits`.

use quire_ptxsim::{CtaOrder, SimError};
use quire_tests::args;
use quire_tests::ptx::{Element, Gpu, Kernels, Variant};
use quire_tests::rng::Rng;

pub const TESTED: &[&str] = &["decode_attention", "fold_splits", "prefill_attention"];

/// No window.
const ALL: usize = i32::MAX as usize;

/// One sequence of a step.
#[derive(Clone, Copy, Debug)]
pub struct Seq {
    /// Keys in the cache before the step.
    pub computed: usize,
    /// New rows.
    pub rows: usize,
    /// Its contents are a function of this.
    pub id: usize,
}

impl Seq {
    fn len(self) -> usize {
        self.computed + self.rows
    }
}

/// Shapes of a layer, and what to attend to.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub kv_heads: usize,
    pub group: usize,
    pub head_dim: usize,
    pub block_shift: usize,
    pub window: usize,
    pub softcap: f32,
}

impl Case {
    pub const PLAIN: Case =
        Case { kv_heads: 1, group: 1, head_dim: 64, block_shift: 4, window: ALL, softcap: 0.0 };

    fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    fn scale(&self) -> f32 {
        (self.head_dim as f32).sqrt().recip()
    }

    /// Values of a sequence's query (0), key (1) or value (2) at a position, for all its heads.
    fn values(&self, seq: Seq, what: usize, position: usize, element: Element) -> Vec<f32> {
        let heads = if what == 0 { self.heads() } else { self.kv_heads };
        let mut rng = Rng::new((seq.id * 3 + what) as u64 * 1_000_003 + position as u64);
        let values = rng.floats(heads * self.head_dim, 2.0);
        values.into_iter().map(|x| element.round(x)).collect()
    }
}

/// The three kernels of one element type and head size.
pub struct Attention<'a> {
    pub prefill: Variant<'a>,
    pub decode: Variant<'a>,
    pub fold: Variant<'a>,
}

impl<'a> Attention<'a> {
    pub fn all(kernels: &'a Kernels) -> Vec<Attention<'a>> {
        let shape = |v: &Variant<'_>| (v.element(), v.constant("HEAD_DIM"), v.constant("PADDED"));
        let prefill = kernels.variants("prefill_attention");
        let shapes: Vec<_> = prefill.iter().map(shape).collect();
        let decode = kernels.variants("decode_attention");
        assert_eq!(decode.len(), prefill.len(), "prefill and decode come in pairs");
        let mut decode: Vec<Option<Variant<'a>>> = decode.into_iter().map(Some).collect();
        let mut partner = |wanted| {
            let is = |v: &&mut Option<Variant<'_>>| v.as_ref().is_some_and(|v| shape(v) == wanted);
            decode.iter_mut().find(is).and_then(Option::take).expect("a partner for decode")
        };
        let mut with = |(prefill, shape): (Variant<'a>, _)| {
            let fold = kernels.of("fold_splits", prefill.element());
            Attention { decode: partner(shape), fold, prefill }
        };
        prefill.into_iter().zip(shapes).map(&mut with).collect()
    }

    pub fn element(&self) -> Element {
        self.prefill.element()
    }

    /// Head sizes that the variants serve.
    pub fn head_dims(&self) -> Vec<usize> {
        let largest = self.prefill.constant("HEAD_DIM");
        match (self.prefill.constant("PADDED") == 1, largest) {
            (false, _) => vec![largest],
            (true, 32) => vec![16, 32],
            (true, _) => vec![80, 96],
        }
    }
}

/// A step laid out on a device: the cache holds what the sequences wrote and NaN elsewhere.
pub struct Step {
    pub gpu: Gpu,
    case: Case,
    element: Element,
    seqs: Vec<Seq>,
    pub cache: u64,
    cache_bytes: u64,
    pub tables: u64,
    table_stride: usize,
    q: u64,
    q_stride: usize,
    out: u64,
    out_stride: usize,
    starts: Vec<i32>,
    query_start_loc: u64,
    seq_lens: u64,
}

impl Step {
    /// What no sequence wrote is NaN.
    pub fn new(case: Case, element: Element, seqs: &[Seq], order: CtaOrder) -> Step {
        let mut step = Step::undefined_elsewhere(case, element, seqs);
        step.gpu.order = order;
        let nan = element.encode(&[f32::NAN]);
        for cell in (step.cache..step.cache + step.cache_bytes).step_by(element.bytes()) {
            if !step.gpu.memory.is_written(cell, element.bytes()).expect("inside") {
                step.gpu.memory.write(cell, &nan).expect("inside");
            }
        }
        step
    }

    /// What no sequence wrote is undefined.
    pub fn undefined_elsewhere(case: Case, element: Element, seqs: &[Seq]) -> Step {
        let mut gpu = Gpu::new();
        let block_size = 1 << case.block_shift;
        let blocks_of = |seq: &Seq| seq.len().div_ceil(block_size);
        let num_blocks: usize = 3 + seqs.iter().map(blocks_of).sum::<usize>();
        let mut free: Vec<i32> = (0..num_blocks as i32).collect();
        Rng::new(num_blocks as u64).shuffle(&mut free);
        let table_stride = seqs.iter().map(blocks_of).max().unwrap_or(0) + 1;
        let mut tables = vec![-1; seqs.len() * table_stride];
        let plane = case.kv_heads * block_size * case.head_dim;
        let cache_bytes = num_blocks * 2 * plane * element.bytes();
        let cache = gpu.empty("kv_cache", cache_bytes);
        let (q_stride, out_stride) =
            (case.heads() * case.head_dim + 32, case.heads() * case.head_dim + 16);
        let (mut q, mut starts) = (Vec::new(), vec![0]);
        for (i, seq) in seqs.iter().enumerate() {
            for position in 0..seq.len() {
                if position % block_size == 0 {
                    tables[i * table_stride + position / block_size] = free.pop().expect("enough");
                }
                let block = tables[i * table_stride + position / block_size] as usize;
                for side in 0..2 {
                    let values = case.values(*seq, 1 + side, position, element);
                    for (head, values) in values.chunks_exact(case.head_dim).enumerate() {
                        let at = (block * 2 + side) * plane
                            + (head * block_size + position % block_size) * case.head_dim;
                        let address = cache + (at * element.bytes()) as u64;
                        let values = element.encode(values);
                        gpu.memory.write(address, &values).expect("inside the cache");
                    }
                }
            }
            for position in seq.computed..seq.len() {
                q.extend(case.values(*seq, 0, position, element));
                q.resize(q.len() + q_stride - case.heads() * case.head_dim, f32::NAN);
            }
            starts.push((q.len() / q_stride) as i32);
        }
        let lens: Vec<i32> = seqs.iter().map(|seq| seq.len() as i32).collect();
        let rows = q.len() / q_stride;
        Step {
            cache,
            cache_bytes: cache_bytes as u64,
            tables: gpu.i32s("block_tables", &tables),
            q: gpu.floats("q", element, &q),
            out: gpu.empty("out", rows * out_stride * element.bytes()),
            query_start_loc: gpu.i32s("query_start_loc", &starts),
            seq_lens: gpu.i32s("seq_lens", &lens),
            gpu,
            case,
            element,
            seqs: seqs.to_vec(),
            table_stride,
            q_stride,
            out_stride,
            starts,
        }
    }

    /// Prefill over the sequences that `wanted` names.
    pub fn prefill(&mut self, variant: &Variant<'_>, wanted: impl Fn(Seq) -> bool) {
        let tile_rows = variant.constant("BLOCK_M") / self.case.group;
        let (mut seqs, mut rows) = (Vec::new(), Vec::new());
        for (i, seq) in self.seqs.iter().enumerate().filter(|(_, seq)| wanted(**seq)) {
            for first in (0..seq.rows).step_by(tile_rows) {
                seqs.push(i as i32);
                rows.push(first as i32);
            }
        }
        let tile_seqs = self.gpu.i32s("tile_seqs", &seqs);
        let tile_starts = self.gpu.i32s("tile_starts", &rows);
        let v_tiles = variant.constant("HEAD_DIM") / variant.constant("BLOCK_V");
        let grid = [seqs.len(), self.case.kv_heads, v_tiles];
        let case = self.case;
        self.gpu.launch(variant, &grid, args![
            out: self.out, q: self.q, kv_cache: self.cache, block_tables: self.tables, tile_seqs,
            tile_starts, query_start_loc: self.query_start_loc, seq_lens: self.seq_lens,
            q_stride: self.q_stride, out_stride: self.out_stride, table_stride: self.table_stride,
            num_kv_heads: case.kv_heads, group: case.group, head_dim: case.head_dim,
            block_shift: case.block_shift, scale: case.scale(), softcap: case.softcap,
            window: case.window,
        ]);
    }

    /// Decode of the sequences with one row, and the fold where there are several splits.
    pub fn decode(&mut self, decode: &Variant<'_>, fold: &Variant<'_>, num_splits: usize) {
        self.try_decode(decode, fold, num_splits).unwrap_or_else(|e| panic!("{e}"));
    }

    /// The same; the first fault is the result.
    pub fn try_decode(
        &mut self,
        decode: &Variant<'_>,
        fold: &Variant<'_>,
        num_splits: usize,
    ) -> Result<(), SimError> {
        let case = self.case;
        let partials = self.seqs.len() * num_splits * case.heads();
        let (partial_max, partial_sum) = (
            self.gpu.empty("partial_max", 4 * partials),
            self.gpu.empty("partial_sum", 4 * partials),
        );
        let partial_acc = self.gpu.empty("partial_acc", 4 * partials * case.head_dim);
        let v_tiles = decode.constant("HEAD_DIM") / decode.constant("BLOCK_V");
        let head_tiles = case.group.div_ceil(decode.constant("BLOCK_M"));
        let grid = [self.seqs.len(), case.kv_heads * head_tiles * v_tiles, num_splits];
        self.gpu.try_launch(decode, &grid, args![
            out: self.out, partial_max, partial_sum, partial_acc, q: self.q,
            kv_cache: self.cache, block_tables: self.tables, query_start_loc: self.query_start_loc,
            seq_lens: self.seq_lens, q_stride: self.q_stride, out_stride: self.out_stride,
            table_stride: self.table_stride, num_kv_heads: case.kv_heads, group: case.group,
            head_dim: case.head_dim, block_shift: case.block_shift, scale: case.scale(),
            softcap: case.softcap, window: case.window,
        ])?;
        if num_splits > 1 {
            let grid =
                [self.seqs.len(), case.heads(), case.head_dim.div_ceil(fold.constant("BLOCK_D"))];
            self.gpu.try_launch(
                fold,
                &grid,
                args![
                    out: self.out, partial_max, partial_sum, partial_acc,
                    query_start_loc: self.query_start_loc, seq_lens: self.seq_lens,
                    out_stride: self.out_stride, num_heads: case.heads(), head_dim: case.head_dim,
                    num_splits, window: case.window,
                ],
            )?;
        }
        Ok(())
    }

    /// Decode for single rows with as many splits as the longest needs, prefill for the others.
    fn run(&mut self, attention: &Attention<'_>) {
        let split = attention.decode.constant("SPLIT");
        let longest = self.seqs.iter().filter(|s| s.rows == 1).map(|s| s.len()).max();
        if let Some(longest) = longest {
            self.decode(&attention.decode, &attention.fold, longest.div_ceil(split));
        }
        if self.seqs.iter().any(|seq| seq.rows > 1) {
            self.prefill(&attention.prefill, |seq| seq.rows > 1);
        }
    }

    /// The rows of sequence `i`, `[rows, Hq D]` one after the other.
    fn rows(&self, i: usize) -> Vec<Vec<f32>> {
        let width = self.case.heads() * self.case.head_dim;
        let at =
            |row: i32| self.out + (row as usize * self.out_stride * self.element.bytes()) as u64;
        let rows = self.starts[i]..self.starts[i + 1];
        rows.map(|row| self.gpu.read(at(row), self.element, width)).collect()
    }
}

fn bits(rows: &[Vec<f32>]) -> Vec<u32> {
    rows.iter().flatten().map(|x| x.to_bits()).collect()
}

/// Attention of one row in f64, and for each output Σ p |v|: what rounding errors are relative to.
fn formula(case: &Case, element: Element, seq: Seq, position: usize) -> Vec<(f64, f64)> {
    let first = (position + 1).saturating_sub(case.window);
    let q = case.values(seq, 0, position, element);
    let keys: Vec<_> = (first..=position).map(|j| case.values(seq, 1, j, element)).collect();
    let values: Vec<_> = (first..=position).map(|j| case.values(seq, 2, j, element)).collect();
    let d = case.head_dim;
    let mut out = Vec::new();
    for head in 0..case.heads() {
        let kv = head / case.group * d;
        let score = |key: &Vec<f32>| {
            let products = q[head * d..][..d].iter().zip(&key[kv..kv + d]);
            let sum: f64 = products.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            let score = sum * f64::from(case.scale());
            let cap = f64::from(case.softcap);
            if cap > 0.0 { cap * (score / cap).tanh() } else { score }
        };
        let scores: Vec<f64> = keys.iter().map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        for i in 0..d {
            let terms = weights.iter().zip(&values).map(|(p, v)| p * f64::from(v[kv + i]) / total);
            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
            out.push((sum, size));
        }
    }
    out
}

/// Each weight is rounded to the element type (half an ulp) and so is the result; scores, their
/// exponentials and sums are in f32, where the errors of a score of some tens reach 2^-17.
fn assert_close(case: &Case, element: Element, seq: Seq, rows: &[Vec<f32>]) {
    for (row, got) in rows.iter().enumerate() {
        let position = seq.computed + row;
        for (i, (&got, (want, size))) in
            got.iter().zip(formula(case, element, seq, position)).enumerate()
        {
            let bound = (element.ulp() + 2f64.powi(-17)) * size + element.ulp() * want.abs() + 1e-7;
            assert!(
                (f64::from(got) - want).abs() <= bound,
                "{case:?} {element} {seq:?}, row {row}, column {i}: {got} is not {want} ± {bound}"
            );
        }
    }
}

/// Runs the sequences together and checks all rows of the first `checked`; then each of them alone,
/// in another order of blocks and with another block size, for equal bits.
fn check(attention: &Attention<'_>, case: Case, seqs: &[Seq], checked: usize) {
    let element = attention.element();
    let mut together = Step::new(case, element, seqs, CtaOrder::Forward);
    together.run(attention);
    for (i, &seq) in seqs.iter().enumerate().take(checked) {
        let rows = together.rows(i);
        assert_close(&case, element, seq, &rows);
        let other = Case { block_shift: if case.block_shift == 3 { 6 } else { 3 }, ..case };
        let mut alone = Step::new(other, element, &[seq], CtaOrder::Reverse);
        alone.run(attention);
        assert_eq!(bits(&alone.rows(0)), bits(&rows), "{case:?} {seq:?} alone");
    }
}

/// Decode's row is prefill's, of one row or the last of a chunk; chunks do not matter.
fn check_chunks(attention: &Attention<'_>, case: Case, len: usize) {
    let element = attention.element();
    let run = |seq: Seq, as_prefill: bool| {
        let mut step = Step::new(case, element, &[seq], CtaOrder::Shuffled(len as u64));
        if as_prefill {
            step.prefill(&attention.prefill, |_| true);
        } else {
            // One split more than needed.
            let splits = len.div_ceil(attention.decode.constant("SPLIT"));
            step.decode(
                &attention.decode,
                &attention.fold,
                if len.is_multiple_of(2) { splits } else { splits + 1 },
            );
        }
        step.rows(0).pop().expect("a row")
    };
    let seq = |rows: usize| Seq { computed: len - rows, rows, id: 9 };
    let decoded = run(seq(1), false);
    assert_close(&case, element, seq(1), std::slice::from_ref(&decoded));
    let mut chunks = vec![1, len.min(2), len.min(19)];
    chunks.dedup();
    for rows in chunks {
        let got = run(seq(rows), true);
        assert_eq!(
            bits(&[got]),
            bits(std::slice::from_ref(&decoded)),
            "{case:?}, {len} keys, chunk of {rows}"
        );
    }
}

#[test]
fn contexts_and_groups() {
    let kernels = Kernels::load();
    let contexts = [1, 15, 16, 17, 255, 256, 257];
    for attention in Attention::all(&kernels) {
        for (i, head_dim) in attention.head_dims().into_iter().enumerate() {
            for (j, &len) in contexts.iter().enumerate() {
                let group = [1, 3, 4, 7, 8][(i + j) % 5];
                let block_shift = 3 + (i + j) % 5;
                let case = Case { group, head_dim, block_shift, ..Case::PLAIN };
                check_chunks(&attention, case, len);
            }
        }
    }
}

#[test]
fn a_long_context() {
    let kernels = Kernels::load();
    for attention in Attention::all(&kernels).iter().filter(|a| a.element() == Element::Bf16) {
        let head_dim = attention.head_dims()[0];
        check_chunks(attention, Case { group: 7, head_dim, ..Case::PLAIN }, 4096);
    }
}

#[test]
fn windows_and_caps() {
    let kernels = Kernels::load();
    for attention in Attention::all(&kernels) {
        let head_dim = attention.head_dims()[0];
        for (window, softcap, len) in [(5, 0.0, 40), (31, 3.0, 70), (256, 0.0, 300), (1, 0.0, 17)] {
            let case = Case { window, softcap, head_dim, group: 3, ..Case::PLAIN };
            check_chunks(&attention, case, len);
        }
    }
}

#[test]
fn ragged_batches() {
    let kernels = Kernels::load();
    let seq = |id: usize, computed: usize, rows: usize| Seq { computed, rows, id };
    for attention in Attention::all(&kernels) {
        let head_dim = attention.head_dims()[0];
        let case = Case { kv_heads: 2, group: 3, head_dim, ..Case::PLAIN };
        let seqs = [seq(1, 0, 37), seq(2, 9, 1), seq(3, 250, 9), seq(4, 0, 1), seq(5, 256, 1)];
        check(&attention, case, &seqs, 5);
    }
    // Seventy sequences, decode and prefill mixed; a few of them looked at.
    let many: Vec<Seq> =
        (0..70).map(|i| seq(i, i * 7 % 40, if i % 4 == 1 { 3 } else { 1 })).collect();
    for attention in Attention::all(&kernels).iter().filter(|a| a.element() == Element::Bf16) {
        let case = Case { group: 4, head_dim: attention.head_dims()[0], ..Case::PLAIN };
        check(attention, case, &many, 3);
    }
}

#[test]
fn a_cache_of_more_than_two_to_the_31_elements() {
    // One block is there, at its place in a cache of 2^32 elements of which the rest is not.
    let kernels = Kernels::load();
    for attention in Attention::all(&kernels) {
        let case = Case { head_dim: attention.head_dims()[0], group: 2, ..Case::PLAIN };
        let seq = Seq { computed: 10, rows: 1, id: 3 };
        let element = attention.element();
        let near = Step::new(case, element, &[seq], CtaOrder::Forward);
        let block_elements = 2 * case.kv_heads * (case.head_dim << case.block_shift);
        let far_block = (1usize << 32) / block_elements;
        let table = near.gpu.read_i32s(near.tables, 1)[0] as usize;
        let moved = ((far_block - table) * block_elements * element.bytes()) as u64;
        for prefill in [true, false] {
            let mut expected = Step::new(case, element, &[seq], CtaOrder::Forward);
            let mut far = Step::new(case, element, &[seq], CtaOrder::Forward);
            far.cache -= moved;
            far.tables = far.gpu.i32s("block_tables", &[far_block as i32, -1]);
            for step in [&mut expected, &mut far] {
                if prefill {
                    step.prefill(&attention.prefill, |_| true);
                } else {
                    step.decode(&attention.decode, &attention.fold, 1);
                }
            }
            assert_eq!(bits(&far.rows(0)), bits(&expected.rows(0)), "{}", attention.prefill.name());
        }
    }
}
