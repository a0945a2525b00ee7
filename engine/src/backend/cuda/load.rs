//! From a model's files to device memory, and what everything there takes.

use super::driver::CUBLAS_BYTES;
use super::driver::{Context, DeviceBuffer, PinnedBuffer, Stream};
use super::element::Compute;
use super::error::CudaError;
use super::sampling::{DeviceSampler, SamplerLimits};
use super::tensors::{CudaMatrix, CudaTensor, CudaVector, ROW_MULTIPLE, layer_block_bytes};
use super::{attention, step, swap};
use crate::backend::GemmMode;
use crate::memory::BufferSizes;
use crate::model::MAX_LOGIT_ROWS;
use crate::ops::{
    BackendError, DType, KvLayout, MatrixLayout, MatrixShape, ReadError, StepLimits, TensorKind,
    WeightRows,
};
use half::bf16;
use std::marker::PhantomData;

/// Bytes of weights that are copied while the next are read.
const STAGE_BYTES: usize = 16 << 20;
/// What they are, where there is no memory for them.
const STAGED: &str = "weights being copied";

/// What the buffers of a [`CudaBackend`](super::CudaBackend) take on the device.
#[derive(Clone, Copy, Debug)]
pub struct CudaBuffers {
    dtype: DType,
    gemm: GemmMode,
}

impl CudaBuffers {
    /// Those of a backend that computes in `dtype` and multiplies by `gemm`.
    pub fn new(dtype: DType, gemm: GemmMode) -> Self {
        CudaBuffers { dtype, gemm }
    }

    /// Those of a backend that computes in `T`, for what does not depend on who multiplies.
    fn of<T: Compute>() -> Self {
        CudaBuffers::new(T::COMPUTE, GemmMode::Triton)
    }
}

/// Elements of a row, with what it is padded by.
pub(super) fn padded(n: usize) -> Option<usize> {
    n.checked_next_multiple_of(ROW_MULTIPLE)
}

impl BufferSizes for CudaBuffers {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn matrix_bytes(&self, matrix: &MatrixShape) -> Option<usize> {
        padded(matrix.n)?.checked_mul(matrix.k)?.checked_mul(self.dtype.size())
    }

    fn vector_bytes(&self, len: usize) -> Option<usize> {
        padded(len)?.checked_mul(size_of::<f32>())
    }

    fn tensor_bytes(&self, max_rows: usize, cols: usize, kind: TensorKind) -> Option<usize> {
        let value = match kind {
            TensorKind::F32 => size_of::<f32>(),
            TensorKind::Compute => self.dtype.size(),
        };
        max_rows.checked_mul(padded(cols)?)?.checked_mul(value)
    }

    fn kv_bytes(&self, layout: &KvLayout) -> Option<usize> {
        layout.block_bytes()?.checked_mul(layout.num_blocks)
    }

    fn sampling_bytes(&self, limits: &StepLimits) -> Option<usize> {
        DeviceSampler::bytes(&sampler_limits(limits)?)
    }

    fn step_bytes(
        &self,
        limits: &StepLimits,
        layout: &KvLayout,
        _: &[MatrixShape],
    ) -> Option<usize> {
        let parts = [
            step::bytes(limits)?,
            attention::scratch_bytes(limits.max_positions, limits.num_heads, layout.head_dim),
            if limits.swap { swap::device_bytes(layout.block_bytes()?) } else { 0 },
            if self.gemm == GemmMode::Cublas { CUBLAS_BYTES } else { 0 },
        ];
        parts.into_iter().try_fold(0, usize::checked_add)
    }

    fn swap_is_apart(&self) -> bool {
        true
    }
}

/// What the sampler has room for.
pub(super) fn sampler_limits(limits: &StepLimits) -> Option<SamplerLimits> {
    Some(SamplerLimits {
        max_rows: limits.max_tokens,
        slice_rows: MAX_LOGIT_ROWS.min(limits.max_tokens),
        stride: padded(limits.vocab_size)?,
        max_top: limits.max_logprobs,
    })
}

fn too_large(what: &str) -> CudaError {
    CudaError::OutOfMemory { what: what.to_owned(), bytes: usize::MAX, free: 0 }
}

/// An activation.
pub(super) fn tensor<T: Compute>(
    context: &Context,
    max_rows: usize,
    cols: usize,
    kind: TensorKind,
) -> Result<CudaTensor<T>, CudaError> {
    let what = "activations";
    let bytes = CudaBuffers::of::<T>().tensor_bytes(max_rows, cols, kind);
    let buffer = context.alloc(bytes.ok_or_else(|| too_large(what))?, what)?;
    let stride = padded(cols).expect("its bytes can be counted");
    Ok(CudaTensor { buffer, rows: 0, max_rows, cols, stride, kind, element: PhantomData })
}

/// A small parameter, copied on `stream`.
pub(super) fn vector(
    (context, stream): (&Context, &Stream),
    data: &[f32],
) -> Result<CudaVector, CudaError> {
    let what = "norms, biases and rotary tables";
    let mut padded_data = data.to_vec();
    padded_data.resize(padded(data.len()).ok_or_else(|| too_large(what))?, 0.0);
    let bytes = bytemuck::cast_slice(&padded_data);
    let buffer = context.alloc(bytes.len(), what)?;
    stream.upload_now(bytes, &buffer, 0)?;
    Ok(CudaVector { buffer })
}

/// Blocks of a KV cache in device memory, zeros: a block is copied and swapped whole, whatever part
/// of it was written.
pub(super) fn kv_buffer(
    (context, stream): (&Context, &Stream),
    layout: &KvLayout,
) -> Result<DeviceBuffer, CudaError> {
    let what = "the KV cache";
    let sizes = CudaBuffers::new(layout.dtype, GemmMode::Triton);
    let bytes = sizes.kv_bytes(layout).ok_or_else(|| too_large(what))?;
    // Kernels count blocks, and words within them, in 32 bits.
    let words = layer_block_bytes(layout) / 4;
    if i32::try_from(layout.num_blocks).is_err() || i32::try_from(words).is_err() {
        return Err(too_large(what));
    }
    let buffer = context.alloc(bytes, what)?;
    stream.zero(&buffer, 0..bytes)?;
    Ok(buffer)
}

/// Copies weights to the device: two pieces of page-locked memory, one of which is filled by several
/// threads while the other is copied.
pub(super) struct Uploader<T> {
    stream: Stream,
    stages: [PinnedBuffer; 2],
    turn: usize,
    element: PhantomData<fn() -> T>,
}

impl<T: Compute> Uploader<T> {
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let stage = || context.alloc_pinned(0, STAGED);
        Ok(Uploader {
            stream: context.stream()?,
            stages: [stage()?, stage()?],
            turn: 0,
            element: PhantomData,
        })
    }

    /// A weight of `n` rows and `k` columns.
    pub fn matrix(
        &mut self,
        context: &Context,
        (layout, n, k): (MatrixLayout, usize, usize),
        rows: &dyn WeightRows,
    ) -> Result<CudaMatrix<T>, BackendError> {
        check_shape(layout, n, k)?;
        let shape = MatrixShape { layout, n, k, blocks: None };
        let bytes = CudaBuffers::of::<T>().matrix_bytes(&shape);
        let buffer = context.alloc(bytes.ok_or_else(|| too_large("weights"))?, "weights")?;
        let row_bytes = k * size_of::<T>();
        let at_once = (STAGE_BYTES / row_bytes).max(1);
        if row_bytes > STAGE_BYTES {
            let reason = format!("a weight of {k} columns; at most {} bytes a row", STAGE_BYTES);
            return Err(CudaError::Unsupported { reason }.into());
        }
        for start in (0..n).step_by(at_once) {
            let count = at_once.min(n - start);
            self.turn = 1 - self.turn;
            let stage = &mut self.stages[self.turn];
            if stage.len() < count * row_bytes {
                *stage = context.alloc_pinned(count * row_bytes, STAGED)?;
            }
            read_rows(&mut stage.as_mut_slice::<T>()?[..count * k], k, start, rows)?;
            self.stream.upload(stage, 0..count * row_bytes, &buffer, start * row_bytes)?;
        }
        let padded_n = padded(n).expect("its bytes can be counted");
        self.stream.zero(&buffer, n * row_bytes..padded_n * row_bytes)?;
        Ok(CudaMatrix { buffer, layout, n, padded_n, k, element: PhantomData })
    }

    /// Waits until all weights are there.
    pub fn finish(self) -> Result<(), CudaError> {
        self.stream.synchronize()
    }
}

fn check_shape(layout: MatrixLayout, n: usize, k: usize) -> Result<(), CudaError> {
    let rows = if layout == MatrixLayout::GateUp { n / 2 } else { ROW_MULTIPLE };
    let fits = |size: usize| i32::try_from(size).is_ok_and(|size| size < i32::MAX - 1024);
    if k.is_multiple_of(ROW_MULTIPLE) && rows.is_multiple_of(ROW_MULTIPLE) && fits(n) && fits(k) {
        return Ok(());
    }
    let reason = format!(
        "a weight of {n} × {k}; hidden and intermediate sizes must be multiples of {ROW_MULTIPLE}"
    );
    Err(CudaError::Unsupported { reason })
}

/// Reads rows from `start` on into `out`, on the cores there are.
fn read_rows<T: Compute>(
    out: &mut [T],
    k: usize,
    start: usize,
    rows: &dyn WeightRows,
) -> Result<(), BackendError> {
    let threads = quire_kernels_cpu::usable_cores();
    let rows_each = (out.len() / k).div_ceil(threads).max(1);
    let parts = out.chunks_mut(rows_each * k).enumerate();
    let result: Result<(), ReadError> = std::thread::scope(|scope| {
        let reading: Vec<_> = parts
            .map(|(i, part)| scope.spawn(move || read_part(part, k, start + i * rows_each, rows)))
            .collect();
        reading.into_iter().try_for_each(|part| part.join().expect("reading does not panic"))
    });
    result.map_err(BackendError::Source)
}

/// Rows from `start` on: their bytes where the file has them in this type, else their values.
fn read_part<T: Compute>(
    out: &mut [T],
    k: usize,
    start: usize,
    rows: &dyn WeightRows,
) -> Result<(), ReadError> {
    let mut values = Vec::new();
    let stored = rows.stored_type() == Some(T::COMPUTE);
    for (i, out) in out.chunks_exact_mut(k).enumerate() {
        if stored && let Some(bytes) = rows.stored(start + i) {
            bytemuck::cast_slice_mut(out).copy_from_slice(bytes);
            continue;
        }
        values.resize(k, 0.0);
        rows.read(start + i, &mut values)?;
        for (out, &value) in out.iter_mut().zip(&values) {
            *out = T::from_f32(value);
        }
    }
    Ok(())
}

/// The values of a row of bytes.
pub(super) fn to_floats(bytes: &[u8], kind: TensorKind, dtype: DType, out: &mut Vec<f32>) {
    if kind == TensorKind::F32 || dtype == DType::F32 {
        out.extend(bytemuck::pod_collect_to_vec::<u8, f32>(bytes));
    } else {
        out.extend(bytemuck::pod_collect_to_vec::<u8, bf16>(bytes).iter().map(|v| v.to_f32()));
    }
}
