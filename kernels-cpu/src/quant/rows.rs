//! Activations quantised row by row.

use super::kind::QuantKind;
use super::scale_and_inverse;
use crate::buf::AllocError;
use crate::ctx::Ctx;
use crate::dtype::Dtype;
use crate::ptr::SharedMut;
use crate::simd::{IntKernel, IntPath, IntSimd, LANES, dispatch_int};

/// Elements unpacked at a time.
const CHUNK: usize = 32;

/// Words that hold a chunk, quantised.
const CHUNK_WORDS: usize = CHUNK / 4;

/// Rows of activations, quantised for [`super::gemm_quant`]. The buffer is reused: it grows to
/// the largest batch it has seen.
pub struct QuantRows {
    pub(super) kind: QuantKind,
    pub(super) dtype: Dtype,
    pub(super) m: usize,
    pub(super) k: usize,
    /// `[M][ceil(K/4)]` words of four signed bytes, zeros past K.
    pub(super) quants: Vec<u32>,
    /// `[M][blocks][terms]`, see [`QuantKind::terms`].
    pub(super) terms: Vec<u32>,
}

impl Default for QuantRows {
    fn default() -> Self {
        Self::new()
    }
}

impl QuantRows {
    /// No rows.
    pub const fn new() -> Self {
        Self {
            kind: QuantKind::Int8,
            dtype: Dtype::F32,
            m: 0,
            k: 0,
            quants: Vec::new(),
            terms: Vec::new(),
        }
    }

    /// Words of a row of `k` inputs: of its values, and of what describes its blocks. The rows
    /// have a buffer for each of both.
    pub const fn words_of(kind: QuantKind, k: usize) -> [usize; 2] {
        [k.div_ceil(4), kind.row_blocks(k) * kind.terms()]
    }

    /// Makes room for `m` rows of `k` inputs, and no more, so that [`Self::quantise`] does not
    /// allocate.
    pub fn reserve(&mut self, kind: QuantKind, m: usize, k: usize) -> Result<(), AllocError> {
        let [quants, terms] = Self::words_of(kind, k);
        grow(&mut self.quants, m, quants)?;
        grow(&mut self.terms, m, terms)
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        4 * (self.quants.capacity() + self.terms.capacity())
    }

    /// Rows held.
    pub fn m(&self) -> usize {
        self.m
    }

    /// Inputs of a row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Words of a quantised row.
    pub(super) fn row_words(&self) -> usize {
        self.k.div_ceil(4)
    }

    /// Words that describe the blocks of a row.
    pub(super) fn row_terms(&self) -> usize {
        self.kind.row_blocks(self.k) * self.kind.terms()
    }

    /// Replaces the rows by the `m` of `x`, `[M][words(K)]` words of `dtype`, quantised for
    /// weights of `kind` (or of a kind with [`QuantKind::same_rows`]).
    ///
    /// Panics if a length does not fit the shape, or a matrix of `kind` cannot have `k` inputs.
    pub fn quantise(
        &mut self,
        ctx: &Ctx,
        (x, dtype): (&[u32], Dtype),
        (m, k): (usize, usize),
        kind: QuantKind,
    ) {
        self.quantise_on(IntPath::of(ctx.isa), ctx, (x, dtype), (m, k), kind);
    }

    pub(super) fn quantise_on(
        &mut self,
        path: IntPath,
        ctx: &Ctx,
        (x, dtype): (&[u32], Dtype),
        (m, k): (usize, usize),
        kind: QuantKind,
    ) {
        assert_eq!(x.len(), m * dtype.words(k), "quantise: words of {m} rows of {k} inputs");
        if let Err(error) = kind.check_inputs(k) {
            panic!("quantise: {error}");
        }
        (self.kind, self.dtype, self.m, self.k) = (kind, dtype, m, k);
        // Every word is written below, whatever was there before.
        self.quants.resize(m * self.row_words(), 0);
        self.terms.resize(m * self.row_terms(), 0);
        let (row_words, row_terms) = (self.row_words(), self.row_terms());
        let quants = SharedMut::new(&mut self.quants);
        let terms = SharedMut::new(&mut self.terms);
        ctx.for_rows(m, k, |start, end| {
            for row in start..end {
                // SAFETY: each item has its own rows.
                let (quants, terms) = unsafe {
                    (
                        quants.slice(row * row_words, row_words),
                        terms.slice(row * row_terms, row_terms),
                    )
                };
                let x = &x[row * dtype.words(k)..][..dtype.words(k)];
                dispatch_int(path, Row { x, dtype, k, kind, quants, terms });
            }
        });
    }
}

/// Makes room for `rows` rows of `row` words.
fn grow(buffer: &mut Vec<u32>, rows: usize, row: usize) -> Result<(), AllocError> {
    let len = rows.checked_mul(row).ok_or(AllocError { bytes: usize::MAX })?;
    let error = AllocError { bytes: len.saturating_mul(4) };
    buffer.try_reserve_exact(len.saturating_sub(buffer.len())).map_err(|_| error)
}

/// One row to quantise.
struct Row<'a> {
    x: &'a [u32],
    dtype: Dtype,
    k: usize,
    kind: QuantKind,
    quants: &'a mut [u32],
    terms: &'a mut [u32],
}

impl IntKernel for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: IntSimd>(self, s: S) {
        let (terms, steps) = (self.kind.terms(), self.kind.unit_steps());
        let block = if self.kind == QuantKind::Int8 { self.k } else { 4 * steps };
        let words = self.dtype.words(block);
        let blocks =
            self.x.chunks(words.max(1)).zip(self.quants.chunks_mut(block.div_ceil(4).max(1)));
        for ((x, quants), terms) in blocks.zip(self.terms.chunks_exact_mut(terms)) {
            let (scale, inverse) = block_scale(s, self.dtype, x);
            terms[0] = scale.to_bits();
            if scale.is_nan() {
                quants.fill(0);
                terms[1..].fill(0);
                continue;
            }
            let block = Quantised { inverse, quants, sums: &mut terms[1..] };
            block.fill(s, self.dtype, x, self.kind);
        }
        // A row without inputs has no block in `x`, yet `Int8` describes it.
        if self.k == 0 {
            self.terms.fill(0);
        }
    }
}

/// Scale and inverse of the block `x`.
#[inline(always)]
fn block_scale<S: IntSimd>(s: S, dtype: Dtype, x: &[u32]) -> (f32, f32) {
    let zero = s.splat(0.0);
    let (mut max_abs, mut poison) = (zero, zero);
    for words in x.chunks(dtype.words(CHUNK)) {
        let values = unpack(dtype, words);
        for values in values.as_chunks::<LANES>().0 {
            let v = s.load(values);
            max_abs = s.max(s.max(v, s.sub(zero, v)), max_abs);
            poison = s.add(poison, s.mul(v, zero));
        }
    }
    scale_and_inverse(s.max_lane(max_abs), s.sum(poison))
}

/// Where a block goes.
struct Quantised<'a> {
    inverse: f32,
    quants: &'a mut [u32],
    sums: &'a mut [u32],
}

impl Quantised<'_> {
    /// Quantises the block `x` and adds up its values as weights of `kind` want them.
    #[inline(always)]
    fn fill<S: IntSimd>(self, s: S, dtype: Dtype, x: &[u32], kind: QuantKind) {
        let inverse = s.splat(self.inverse);
        self.sums.fill(0);
        let chunks = x.chunks(dtype.words(CHUNK)).zip(self.quants.chunks_mut(CHUNK_WORDS));
        for (chunk, (x, quants)) in chunks.enumerate() {
            let values = unpack(dtype, x);
            let mut words = [[0; LANES / 4]; CHUNK / LANES];
            for (values, words) in values.as_chunks::<LANES>().0.iter().zip(&mut words) {
                s.round_i8(s.mul(s.load(values), inverse), words);
            }
            let sums = words.map(sum_bytes);
            let words = words.as_flattened();
            if quants.len() == CHUNK_WORDS {
                quants.copy_from_slice(words);
            } else {
                quants.copy_from_slice(&words[..quants.len()]);
            }
            match kind {
                QuantKind::Q6K => {
                    self.sums[2 * chunk] = sums[0].cast_unsigned();
                    self.sums[2 * chunk + 1] = sums[1].cast_unsigned();
                }
                QuantKind::Q4K => {
                    // At most 32 · 127, which fits in 16 bits.
                    let half = u32::from((sums[0] + sums[1]) as u16);
                    let word = chunk / 4 * 2 + chunk % 2;
                    self.sums[word] |= half << (chunk % 4 / 2 * 16);
                }
                _ => self.sums[0] = self.sums[0].wrapping_add_signed(sums[0] + sums[1]),
            }
        }
    }
}

/// Up to [`CHUNK`] elements of `x`, zeros after them.
#[inline(always)]
fn unpack(dtype: Dtype, x: &[u32]) -> [f32; CHUNK] {
    match dtype {
        Dtype::F32 => bytemuck::cast(padded::<CHUNK>(x)),
        Dtype::Bf16 => {
            let mut values = [0.0; CHUNK];
            let words = padded::<{ CHUNK / 2 }>(x);
            for (pair, word) in values.as_chunks_mut::<2>().0.iter_mut().zip(words) {
                *pair = [dtype.extract(word, 0), dtype.extract(word, 1)];
            }
            values
        }
    }
}

/// `x` and zeros after it. A whole chunk is a few loads; the rest of a row is a call to copy it.
#[inline(always)]
fn padded<const N: usize>(x: &[u32]) -> [u32; N] {
    x.try_into().unwrap_or_else(|_| {
        let mut words = [0; N];
        words[..x.len()].copy_from_slice(x);
        words
    })
}

/// Sum of 16 signed bytes.
#[inline(always)]
fn sum_bytes(words: [u32; LANES / 4]) -> i32 {
    let bytes: [i8; LANES] = bytemuck::cast(words);
    bytes.iter().map(|&byte| i32::from(byte)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    fn rows(kind: QuantKind, x: &[f32], m: usize) -> QuantRows {
        let ctx = Ctx::new(Isa::detect(), 2).unwrap();
        let mut rows = QuantRows::new();
        let shape = (m, x.len() / m);
        rows.quantise(&ctx, (bytemuck::cast_slice(x), Dtype::F32), shape, kind);
        rows
    }

    #[test]
    fn the_largest_magnitude_becomes_127_and_zeros_stay_zero() {
        let mut x = [0.0_f32; 96];
        (x[3], x[5], x[40]) = (-2.0, 1.0, 1e-31);
        let rows = rows(QuantKind::Q8_0, &x, 1);
        let bytes: &[i8] = bytemuck::cast_slice(&rows.quants);
        assert_eq!((bytes[3], bytes[5]), (-127, 64));
        assert!(bytes[32..].iter().all(|&byte| byte == 0), "too small to have a scale");
        assert_eq!(
            rows.terms,
            [(2.0_f32 / 127.0).to_bits(), (-63_i32).cast_unsigned(), 0, 0, 0, 0]
        );
    }

    #[test]
    fn a_buffer_is_reused_for_another_shape() {
        let ctx = Ctx::new(Isa::detect(), 2).unwrap();
        let x: Vec<f32> = (0..512).map(|i| (i % 37) as f32 - 18.0).collect();
        let mut reused = rows(QuantKind::Q6K, &x, 2);
        reused.reserve(QuantKind::Q4K, 2, 256).unwrap();
        let words = bytemuck::cast_slice(&x);
        reused.quantise(&ctx, (words, Dtype::F32), (2, 256), QuantKind::Q4K);
        let fresh = rows(QuantKind::Q4K, &x, 2);
        assert_eq!((&reused.quants, &reused.terms), (&fresh.quants, &fresh.terms));
    }

    #[test]
    fn room_is_what_the_widest_rows_take() {
        let mut rows = QuantRows::new();
        for (kind, k) in [(QuantKind::Q4K, 512), (QuantKind::Int8, 1001), (QuantKind::Q6K, 256)] {
            rows.reserve(kind, 3, k).unwrap();
        }
        assert_eq!(QuantRows::words_of(QuantKind::Int8, 1001), [251, 2]);
        assert_eq!(QuantRows::words_of(QuantKind::Q6K, 256), [64, 17]);
        assert_eq!(rows.bytes(), 4 * 3 * (251 + 17));
    }

    #[test]
    fn impossible_sizes_are_errors() {
        let mut rows = QuantRows::new();
        assert!(rows.reserve(QuantKind::Int8, usize::MAX, 64).is_err());
        assert!(rows.reserve(QuantKind::Q6K, 1 << 50, 1 << 20).is_err());
    }
}
