//! Attention: which kernel, and over which grid.
//!
//! Sequences with one new row go to the decode kernel, which spreads long contexts over blocks of
//! the grid; the others to the prefill kernel. Both have the same bits for a row.

use super::arena::Layout;
use super::driver::DeviceBuffer;
use super::element::Compute;
use super::error::CudaError;
use super::launcher::{Kernel, Launcher, Work};
use super::step::StepArrays;
use super::tensors::{CudaKvCache, CudaTensor};
use super::{CudaBackend, SCRATCH_BYTES};
use crate::ops::{AttentionArgs, DType, KvLayout};
use quire_kernels_ptx::DevicePtr;
use quire_kernels_ptx::launch::{DecodeAttention, FoldSplits, PrefillAttention};

/// Keys of a split, in every kernel: the unit in which sums are folded.
pub(super) const SPLIT: usize = 256;
/// A window that every key is in.
const NO_WINDOW: i32 = i32::MAX;

/// The kernels for one size of head.
pub(super) struct Attention<T: Compute> {
    prefill: Kernel<PrefillAttention<T>>,
    decode: Kernel<DecodeAttention<T>>,
    fold: Kernel<FoldSplits<T>>,
}

impl<T: Compute> Attention<T> {
    /// The kernels for heads of `head_dim` elements.
    ///
    /// # Errors
    /// There are none for this size.
    pub fn new(launcher: &mut Launcher, head_dim: usize) -> Result<Self, CudaError> {
        let (width, padded) = head_width(T::COMPUTE, head_dim)?;
        let constants = [("HEAD_DIM", width as i64), ("PADDED", padded.into())];
        Ok(Attention {
            prefill: launcher.select(&constants)?,
            decode: launcher.select(&constants)?,
            fold: launcher.select(&[])?,
        })
    }

    /// New rows of a sequence that one block of the grid takes, with `group` query heads a KV head.
    ///
    /// # Errors
    /// There are more heads than a block takes.
    pub fn tile_rows(&self, group: usize) -> Result<usize, CudaError> {
        let most = self.prefill.tile("BLOCK_M");
        if group > most {
            let reason = format!("{group} query heads for a KV head; at most {most}");
            return Err(CudaError::Unsupported { reason });
        }
        Ok(most / group)
    }
}

/// The width that a kernel for heads of `head_dim` elements is compiled for, and whether it is wider
/// than they are.
///
/// # Errors
/// There is none.
pub(super) fn head_width(dtype: DType, head_dim: usize) -> Result<(usize, bool), CudaError> {
    match head_dim {
        64 | 128 | 256 if dtype == DType::Bf16 => Ok((head_dim, false)),
        16 | 32 => Ok((32, true)),
        n if n > 0 && n <= 128 && n.is_multiple_of(16) => Ok((128, true)),
        _ => {
            let reason = format!(
                "heads of {head_dim} elements in {dtype}: there are kernels for multiples of 16 up \
                 to 128, and for 256 in bf16; run with --device cpu"
            );
            Err(CudaError::Unsupported { reason })
        }
    }
}

/// Partial results of `num_seqs` sequences of `num_splits` splits, all heads.
fn partials(num_seqs: usize, num_splits: usize, num_heads: usize, head_dim: usize) -> Partials {
    let mut layout = Layout::default();
    let heads = num_seqs * num_splits * num_heads;
    let at = [1, 1, head_dim].map(|elements| {
        let at = layout.bytes();
        layout.array::<f32>(heads * elements);
        at
    });
    Partials { at, bytes: layout.bytes() }
}

struct Partials {
    /// Bytes before the maxima, the sums and the accumulators.
    at: [usize; 3],
    bytes: usize,
}

/// What one sequence of `max_positions` tokens needs of the scratch memory.
pub(super) fn scratch_bytes(max_positions: usize, num_heads: usize, head_dim: usize) -> usize {
    // Graphs round the number of splits up to a power of two.
    let num_splits = max_positions.div_ceil(SPLIT).next_power_of_two();
    partials(1, num_splits, num_heads, head_dim).bytes.max(SCRATCH_BYTES)
}

/// What both kernels are given.
struct Shape {
    layout: KvLayout,
    group: usize,
    window: i32,
}

impl<T: Compute> CudaBackend<T> {
    pub(super) fn attend(
        &mut self,
        q: &CudaTensor<T>,
        args: &AttentionArgs,
        kv: &CudaKvCache<T>,
        out: &CudaTensor<T>,
    ) {
        let layout = kv.layout.clone();
        let shape = Shape {
            group: args.num_heads / layout.num_kv_heads,
            window: args.window.map_or(NO_WINDOW, |w| i32::try_from(w).unwrap_or(NO_WINDOW)),
            layout,
        };
        if self.step.num_splits > 0 {
            self.attend_decode(q, args, kv, (out, &shape));
        }
        if self.step.num_tiles > 0 {
            self.attend_prefill(q, args, kv, (out, &shape));
        }
    }

    fn attend_prefill(
        &mut self,
        q: &CudaTensor<T>,
        args: &AttentionArgs,
        kv: &CudaKvCache<T>,
        (out, shape): (&CudaTensor<T>, &Shape),
    ) {
        let kernel = self.attention.as_ref().expect("a KV cache").prefill;
        let step = &self.step;
        let launch = PrefillAttention {
            out: out.values(),
            q: q.values(),
            kv_cache: kv.layer(args.layer),
            block_tables: step.block_tables(),
            tile_seqs: step.tile_seqs(),
            tile_starts: step.tile_starts(),
            query_start_loc: step.query_start_loc(),
            seq_lens: step.seq_lens(),
            q_stride: q.stride as i32,
            out_stride: out.stride as i32,
            table_stride: step.table_stride as i32,
            num_kv_heads: shape.layout.num_kv_heads as i32,
            group: shape.group as i32,
            head_dim: shape.layout.head_dim as i32,
            block_shift: shape.layout.block_size.trailing_zeros() as i32,
            scale: args.scale,
            softcap: 0.0,
            window: shape.window,
        };
        let columns = kernel.tile("HEAD_DIM") / kernel.tile("BLOCK_V");
        let grid = [step.num_tiles, shape.layout.num_kv_heads, columns];
        let work = work::<T>(step, args, shape, false);
        self.launcher.launch(kernel, grid, &launch, || work);
    }

    fn attend_decode(
        &mut self,
        q: &CudaTensor<T>,
        args: &AttentionArgs,
        kv: &CudaKvCache<T>,
        (out, shape): (&CudaTensor<T>, &Shape),
    ) {
        let Attention { decode, fold, .. } = *self.attention.as_ref().expect("a KV cache");
        let KvLayout { num_kv_heads, head_dim, block_size, .. } = shape.layout;
        let (num_splits, num_heads) = (self.step.num_splits, args.num_heads);
        // As many sequences at a time as the scratch memory holds the partial results of.
        let one = partials(1, num_splits, num_heads, head_dim).bytes;
        let at_once = if num_splits == 1 { usize::MAX } else { self.scratch.bytes() / one };
        let mut work = Some(work::<T>(&self.step, args, shape, true));
        let num_seqs = self.step.num_seqs;
        for first in (0..num_seqs).step_by(at_once.min(num_seqs)) {
            let n = at_once.min(num_seqs - first);
            let partials = partials(n, num_splits, num_heads, head_dim);
            let scratch = |i: usize| partial(&self.scratch, &partials, i, num_splits);
            let step = &self.step;
            let launch = DecodeAttention {
                out: out.values(),
                partial_max: scratch(0),
                partial_sum: scratch(1),
                partial_acc: scratch(2),
                q: q.values(),
                kv_cache: kv.layer(args.layer),
                block_tables: offset(step.block_tables(), first * step.table_stride),
                query_start_loc: offset(step.query_start_loc(), first),
                seq_lens: offset(step.seq_lens(), first),
                q_stride: q.stride as i32,
                out_stride: out.stride as i32,
                table_stride: step.table_stride as i32,
                num_kv_heads: num_kv_heads as i32,
                group: shape.group as i32,
                head_dim: head_dim as i32,
                block_shift: block_size.trailing_zeros() as i32,
                scale: args.scale,
                softcap: 0.0,
                window: shape.window,
            };
            let columns = decode.tile("HEAD_DIM") / decode.tile("BLOCK_V");
            let heads = num_kv_heads * shape.group.div_ceil(decode.tile("BLOCK_M"));
            let grid = [n, heads * columns, num_splits];
            // The formula is of all sequences; the first launch has it.
            self.launcher.launch(decode, grid, &launch, || work.take().unwrap_or_default());
            if num_splits == 1 {
                continue;
            }
            let launch = FoldSplits {
                out: launch.out,
                partial_max: launch.partial_max,
                partial_sum: launch.partial_sum,
                partial_acc: launch.partial_acc,
                query_start_loc: launch.query_start_loc,
                seq_lens: launch.seq_lens,
                out_stride: launch.out_stride,
                num_heads: num_heads as i32,
                head_dim: head_dim as i32,
                num_splits: num_splits as i32,
                window: shape.window,
            };
            let grid = [n, num_heads, head_dim.div_ceil(fold.tile("BLOCK_D"))];
            let bytes = partials.bytes + n * num_heads * head_dim * size_of::<T>();
            self.launcher.launch(fold, grid, &launch, || Work::bytes(bytes));
        }
    }
}

/// An array of partial results; none where there is nothing to fold.
fn partial(
    scratch: &DeviceBuffer,
    partials: &Partials,
    i: usize,
    num_splits: usize,
) -> DevicePtr<f32> {
    if num_splits == 1 { DevicePtr::null() } else { scratch.ptr_at(partials.at[i]) }
}

fn offset(base: DevicePtr<i32>, entries: usize) -> DevicePtr<i32> {
    DevicePtr::new(base.address() + (entries * size_of::<i32>()) as u64)
}

/// What the step's attention moves and computes: the sequences with one new row, or the others.
fn work<T>(step: &StepArrays, args: &AttentionArgs, shape: &Shape, decode: bool) -> Work {
    let (keys, pairs, rows) = if decode { step.decode_work } else { step.prefill_work };
    let KvLayout { num_kv_heads, head_dim, .. } = shape.layout;
    let kv = 2 * keys * num_kv_heads * head_dim;
    let q_and_out = 2 * rows * args.num_heads * head_dim;
    Work {
        bytes: ((kv + q_and_out) * size_of::<T>()) as u64,
        flops: (4 * pairs * args.num_heads * head_dim) as u64,
    }
}
