//! What this machine can do at best: bytes read and operations done in a second.
//!
//! A kernel's speed says little by itself; as a share of these it says how much is left. Both are
//! measured as the kernels work: every worker of a [`Ctx`] on its own share, with the loads and
//! the dot products of the instruction set in use. The best of many short runs counts, as others
//! on the machine only take away.

use std::hint::black_box;
use std::marker::PhantomData;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use memmap2::MmapMut;

use crate::buf::{AllocError, Words};
use crate::ctx::Ctx;
use crate::dtype::{Bf16, Elem, F32};
use crate::isa::Isa;
use crate::simd::{IntKernel, IntPath, IntSimd, Kernel, LANES, Simd, dispatch, dispatch_int};

/// Independent sums of a read, so that no addition waits for the one before.
const SUMS: usize = 8;

/// Words added in one round of the sums.
const GROUP: usize = SUMS * LANES;

/// Words from a load to the line it prefetches.
const AHEAD: usize = 1024;

/// A run that is shorter is done several times over, so that waking the workers costs nothing.
const MIN_RUN: Duration = Duration::from_micros(500);

/// Steps along K of the operands of a peak: 9 KiB at most, which stay in L1.
const STEPS: usize = 32;

/// The pages that a [`ReadBuffer`] lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Those of weights: huge ones, where the system gives them.
    Huge,
    /// 4 KiB, or whatever else is the smallest.
    Small,
}

/// What [`read_bandwidth`] reads. Every page is written, so that it is memory of its own.
pub struct ReadBuffer {
    storage: Storage,
    words: usize,
    /// Sum of the words, wrapping.
    sum: u32,
}

enum Storage {
    Huge(Words),
    Small(MmapMut),
}

impl ReadBuffer {
    /// A buffer of `bytes`, rounded up to whole rounds of a read (512 bytes), filled by the workers.
    pub fn new(ctx: &Ctx, bytes: usize, pages: Pages) -> Result<Self, AllocError> {
        let words = bytes.div_ceil(4 * GROUP).max(1) * GROUP;
        let bytes = words.checked_mul(4).ok_or(AllocError { bytes: usize::MAX })?;
        let mut storage = match pages {
            Pages::Huge => Storage::Huge(Words::zeroed(words)?),
            Pages::Small => Storage::Small(small_pages(bytes).ok_or(AllocError { bytes })?),
        };
        let filled = match &mut storage {
            Storage::Huge(buffer) => buffer.as_mut_slice(),
            Storage::Small(map) => bytemuck::cast_slice_mut(map),
        };
        fill(ctx, filled);
        // 0 + 1 + … + (words − 1), whose factors are halved while they are whole.
        let n = words as u64;
        let halves = if n.is_multiple_of(2) { (n / 2, n - 1) } else { (n, (n - 1) / 2) };
        let sum = (halves.0 as u32).wrapping_mul(halves.1 as u32);
        Ok(Self { storage, words, sum })
    }

    /// Bytes of the buffer.
    pub fn bytes(&self) -> usize {
        4 * self.words
    }

    /// Whether huge pages were asked for and the system accepted.
    pub fn huge_pages_requested(&self) -> bool {
        match &self.storage {
            Storage::Huge(words) => words.huge_pages_requested(),
            Storage::Small(_) => false,
        }
    }

    fn words(&self) -> &[u32] {
        match &self.storage {
            Storage::Huge(words) => words.as_slice(),
            Storage::Small(map) => bytemuck::cast_slice(map),
        }
    }
}

/// Memory that is not to lie on huge pages, also where every program gets them.
fn small_pages(bytes: usize) -> Option<MmapMut> {
    let map = MmapMut::map_anon(bytes).ok()?;
    #[cfg(target_os = "linux")]
    // A system without huge pages refuses, and has small ones anyway.
    let _ = map.advise(memmap2::Advice::NoHugePage);
    Some(map)
}

/// Sets each word to its index, on the workers.
fn fill(ctx: &Ctx, words: &mut [u32]) {
    let share = words.len().div_ceil(ctx.pool.threads()).max(1);
    let shares: Vec<_> = words.chunks_mut(share).map(Mutex::new).collect();
    ctx.pool.for_each(shares.len(), |_, item| {
        let mut words = shares[item].lock().expect("one worker has it");
        for (i, word) in words.iter_mut().enumerate() {
            *word = (item * share + i) as u32;
        }
    });
}

/// Work a second: the best of the runs within `budget`, of which there is one at least. `run` does
/// so many passes, at least [`MIN_RUN`] of them in the end, and returns what work that was.
fn best_rate(budget: Duration, mut run: impl FnMut(u32) -> f64) -> f64 {
    let (start, mut passes, mut best) = (Instant::now(), 1, 0.0_f64);
    loop {
        let run_start = Instant::now();
        let work = run(passes);
        let elapsed = run_start.elapsed();
        best = best.max(work / elapsed.as_secs_f64());
        if start.elapsed() >= budget {
            return best;
        }
        if elapsed < MIN_RUN {
            passes = passes.saturating_mul(2);
        }
    }
}

/// Bytes a second that the workers read of `buffer` together, each its own share: the best of the
/// runs within `budget`, of which there is one at least.
///
/// A buffer larger than the caches says what memory gives, a small one what they give.
pub fn read_bandwidth(ctx: &Ctx, buffer: &ReadBuffer, budget: Duration) -> f64 {
    best_rate(budget, |passes| {
        let sum = read(ctx, buffer.words(), passes);
        assert_eq!(sum, buffer.sum.wrapping_mul(passes), "sum of {passes} passes over a buffer");
        buffer.bytes() as f64 * f64::from(passes)
    })
}

/// The sum of `passes` passes of every worker over its share of `words`, wrapping.
fn read(ctx: &Ctx, words: &[u32], passes: u32) -> u32 {
    let (groups, threads) = (words.len() / GROUP, ctx.pool.threads());
    let path = IntPath::of(ctx.isa);
    let sum = AtomicU32::new(0);
    ctx.pool.for_each(threads, |_, worker| {
        let share = worker * groups / threads * GROUP..(worker + 1) * groups / threads * GROUP;
        for _ in 0..passes {
            let words = black_box(&words[share.clone()]);
            sum.fetch_add(dispatch_int(path, Sum { words }), Relaxed);
        }
    });
    sum.into_inner()
}

/// The wrapping sum of words.
struct Sum<'a> {
    words: &'a [u32],
}

impl IntKernel for Sum<'_> {
    type Output = u32;

    #[inline(always)]
    fn run<S: IntSimd>(self, s: S) -> u32 {
        let mut sums = [s.splat_w(0); SUMS];
        for group in self.words.as_chunks::<LANES>().0.as_chunks::<SUMS>().0 {
            for (sum, vector) in sums.iter_mut().zip(group) {
                s.prefetch(vector.as_ptr().wrapping_add(AHEAD));
                *sum = s.add_i(*sum, s.load_w(vector));
            }
        }
        let mut total = 0_u32;
        for sum in sums {
            let mut lanes = [0; LANES];
            s.store_w(sum, &mut lanes);
            for lane in lanes {
                total = total.wrapping_add(lane);
            }
        }
        total
    }
}

/// What a matrix kernel multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixKind {
    /// bf16, with f32 sums.
    Bf16,
    /// f32.
    F32,
    /// Bytes, with 32-bit sums.
    Int8,
}

impl MatrixKind {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::F32, Self::Int8];

    /// The name shown to users.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::Int8 => "int8",
        }
    }
}

/// Multiplications and additions a second of the workers together, each with the dot products of
/// the matrix kernels on a register tile of theirs, its operands in L1: the best of the runs within
/// `budget`, of which there is one at least.
pub fn matrix_peak(ctx: &Ctx, kind: MatrixKind, budget: Duration) -> f64 {
    best_rate(budget, |passes| {
        let done = AtomicU64::new(0);
        ctx.pool.for_each(ctx.pool.threads(), |_, _| {
            done.fetch_add(multiply(ctx.isa, kind, passes), Relaxed);
        });
        (done.into_inner() * STEPS as u64) as f64
    })
}

/// Multiplies on this thread. Returns the sum of all sums: to each, a pass adds what one of its
/// [`STEPS`] steps has in multiplications and additions.
fn multiply(isa: Isa, kind: MatrixKind, passes: u32) -> u64 {
    match kind {
        MatrixKind::Bf16 => dispatch(isa, FloatPeak(passes, PhantomData::<Bf16>)),
        MatrixKind::F32 => dispatch(isa, FloatPeak(passes, PhantomData::<F32>)),
        MatrixKind::Int8 => dispatch_int(IntPath::of(isa), BytePeak(passes)),
    }
}

/// So many passes over floating-point operands.
struct FloatPeak<D>(u32, PhantomData<D>);

impl<D: Elem> Kernel for FloatPeak<D> {
    type Output = u64;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> u64 {
        products::<S, Floats<D>>(s, self.0)
    }
}

/// So many passes over bytes.
struct BytePeak(u32);

impl IntKernel for BytePeak {
    type Output = u64;

    #[inline(always)]
    fn run<S: IntSimd>(self, s: S) -> u64 {
        products::<S, Bytes>(s, self.0)
    }
}

/// Words, and the dot products over them.
trait Products<S: Simd> {
    /// Sums, one a lane.
    type Sum: Copy;
    /// A word of activations that are all 1, and one of them all -1.
    const SIGNS: [u32; 2];
    /// A word of weights that are all 1.
    const ONES: u32;

    fn zero(s: S) -> Self::Sum;
    /// `sum + a·b`.
    fn dot(s: S, sum: Self::Sum, a: S::W, b: S::W) -> Self::Sum;
    /// The sum of the lanes, which are whole and not negative.
    fn total(s: S, sum: Self::Sum) -> u64;
}

/// Words of [`Elem`].
struct Floats<D>(PhantomData<D>);

impl<S: Simd, D: Elem> Products<S> for Floats<D> {
    type Sum = S::V;
    const SIGNS: [u32; 2] =
        if D::PACK == 2 { [0x3f80_3f80, 0xbf80_bf80] } else { [0x3f80_0000, 0xbf80_0000] };
    const ONES: u32 = <Self as Products<S>>::SIGNS[0];

    #[inline(always)]
    fn zero(s: S) -> S::V {
        s.splat(0.0)
    }

    #[inline(always)]
    fn dot(s: S, sum: S::V, a: S::W, b: S::W) -> S::V {
        D::dot(s, sum, a, b)
    }

    #[inline(always)]
    fn total(s: S, sum: S::V) -> u64 {
        s.to_array(sum).iter().map(|&lane| lane as u64).sum()
    }
}

/// Words of four bytes.
struct Bytes;

impl<S: IntSimd> Products<S> for Bytes {
    type Sum = S::W;
    const SIGNS: [u32; 2] = [0x0101_0101, 0xffff_ffff];
    const ONES: u32 = (129 - S::BYTE_BIAS).cast_unsigned() * 0x0101_0101;

    #[inline(always)]
    fn zero(s: S) -> S::W {
        s.splat_w(0)
    }

    #[inline(always)]
    fn dot(s: S, sum: S::W, a: S::W, b: S::W) -> S::W {
        s.dot_bytes(sum, b, a)
    }

    #[inline(always)]
    fn total(s: S, sum: S::W) -> u64 {
        let mut lanes = [0; LANES];
        s.store_w(sum, &mut lanes);
        lanes.iter().map(|&lane| u64::from(lane)).sum()
    }
}

/// `passes` passes over operands of which the activations are 1 in one step more than they are -1
/// on either side of the middle, so that a pass adds two steps' worth of ones to every sum.
#[inline(always)]
fn products<S: Simd, P: Products<S>>(s: S, passes: u32) -> u64 {
    if S::NV == 4 { tile::<S, P, 6, 4>(s, passes) } else { tile::<S, P, 4, 1>(s, passes) }
}

/// [`products`] with a register tile of `R` rows and `NV` column vectors.
#[inline(always)]
fn tile<S: Simd, P: Products<S>, const R: usize, const NV: usize>(s: S, passes: u32) -> u64 {
    let mut rows = [[P::SIGNS[0]; STEPS]; R];
    for row in &mut rows {
        row[STEPS / 2 + 1..].fill(P::SIGNS[1]);
    }
    let columns = [[[P::ONES; LANES]; NV]; STEPS];
    // The compiler is not to know what they are.
    let (rows, columns) = (black_box(&rows), black_box(&columns));
    let mut sums = [[P::zero(s); NV]; R];
    for _ in 0..passes {
        for (step, columns) in columns.iter().enumerate() {
            let mut b = [s.splat_w(0); NV];
            for (b, column) in b.iter_mut().zip(columns) {
                *b = s.load_w(column);
            }
            for (sums, row) in sums.iter_mut().zip(rows) {
                let a = s.splat_w(row[step]);
                for (sum, &b) in sums.iter_mut().zip(&b) {
                    *sum = P::dot(s, *sum, a, b);
                }
            }
        }
    }
    let mut total = 0;
    for sum in sums.as_flattened() {
        total += P::total(s, *sum);
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contexts() -> Vec<Ctx> {
        let isas = Isa::available().into_iter();
        isas.flat_map(|isa| [1, 3].map(|n| Ctx::new(isa, n).unwrap())).collect()
    }

    #[test]
    fn every_word_is_read_once_a_pass() {
        for pages in [Pages::Huge, Pages::Small] {
            let buffer = ReadBuffer::new(&contexts()[1], (2 << 20) + 1, pages).unwrap();
            assert_eq!(buffer.bytes(), (2 << 20) + 4 * GROUP);
            let words = buffer.words();
            assert!(words.iter().enumerate().all(|(i, &word)| word == i as u32));
            let sum: u64 = words.iter().map(|&word| u64::from(word)).sum();
            for ctx in contexts() {
                for passes in [1, 2, 5] {
                    let want = (sum * u64::from(passes)) as u32;
                    assert_eq!(read(&ctx, words, passes), want, "{pages:?} {}", ctx.isa);
                }
            }
        }
    }

    #[test]
    fn small_pages_are_not_huge() {
        let ctx = &contexts()[0];
        let small = ReadBuffer::new(ctx, 4 << 20, Pages::Small).unwrap();
        assert!(!small.huge_pages_requested());
        assert!(ReadBuffer::new(ctx, usize::MAX, Pages::Small).is_err());
        assert!(ReadBuffer::new(ctx, usize::MAX / 2, Pages::Huge).is_err());
    }

    /// The tile has 24 vectors of sums where there are registers for them, else 4.
    #[test]
    fn every_product_is_summed() {
        for isa in Isa::available() {
            let lanes = if isa == Isa::Avx512 || isa == Isa::Avx512Bf16 { 24 } else { 4 } * 16;
            for (kind, pack) in MatrixKind::ALL.into_iter().zip([2, 1, 4]) {
                for passes in [0, 1, 1000] {
                    let ops = lanes * 2 * pack * STEPS as u64 * u64::from(passes);
                    let done = multiply(isa, kind, passes) * STEPS as u64;
                    assert_eq!(done, ops, "{kind:?} on {isa}, {passes} passes");
                }
            }
        }
    }

    #[test]
    fn a_rate_is_work_over_time_and_short_runs_grow() {
        let mut runs = Vec::new();
        let rate = best_rate(Duration::from_millis(20), |passes| {
            runs.push(passes);
            std::thread::sleep(Duration::from_micros(100) * passes);
            f64::from(passes)
        });
        // A sleep is never shorter than asked for.
        assert!(rate > 0.0 && rate <= 1e4, "{rate}");
        assert!(runs.iter().all(|&passes| passes <= 8), "{runs:?}");
        let mut runs = Vec::new();
        best_rate(Duration::from_micros(100), |passes| {
            runs.push(passes);
            1.0
        });
        assert_eq!(runs[..3], [1, 2, 4]);
        assert!(best_rate(Duration::ZERO, |passes| f64::from(passes) * 1e9) > 0.0);
    }

    /// Were a loop optimised away, it would take no time at all.
    #[test]
    fn more_passes_take_longer() {
        let ctx = Ctx::new(Isa::detect(), 1).unwrap();
        let buffer = ReadBuffer::new(&ctx, 1 << 20, Pages::Small).unwrap();
        let shortest = |f: &dyn Fn()| {
            let times = (0..5).map(|_| {
                let start = Instant::now();
                f();
                start.elapsed()
            });
            times.min().unwrap()
        };
        let few = shortest(&|| _ = read(&ctx, buffer.words(), 1));
        let many = shortest(&|| _ = read(&ctx, buffer.words(), 20));
        assert!(many > 5 * few, "20 passes in {many:?}, one in {few:?}");
        for kind in MatrixKind::ALL {
            let few = shortest(&|| _ = multiply(ctx.isa, kind, 1000));
            let many = shortest(&|| _ = multiply(ctx.isa, kind, 20_000));
            assert!(many > 5 * few, "{kind:?}: 20000 passes in {many:?}, 1000 in {few:?}");
        }
    }
}
