//! What lives on the device: activations, weights, parameters, the KV cache; and blocks on the host.

use super::driver::{Context, DeviceBuffer, PinnedBuffer};
use super::element::Compute;
use super::error::CudaError;
use crate::ops::{KvLayout, TensorKind};
use quire_kernels_ptx::{DevicePtr, Element};
use std::fmt;
use std::marker::PhantomData;

/// Rows of activations and weights are multiples of this many elements, as the kernels want them.
pub(super) const ROW_MULTIPLE: usize = 16;

/// `[rows, cols]`, rows `stride` apart.
pub struct CudaTensor<T> {
    pub(super) buffer: DeviceBuffer,
    pub(super) rows: usize,
    pub(super) max_rows: usize,
    pub(super) cols: usize,
    pub(super) stride: usize,
    pub(super) kind: TensorKind,
    pub(super) element: PhantomData<fn() -> T>,
}

impl<T: Compute> CudaTensor<T> {
    pub(super) fn resize(&mut self, rows: usize) {
        assert!(rows <= self.max_rows, "{rows} rows exceed the tensor's {}", self.max_rows);
        self.rows = rows;
    }

    /// The values of an F32 tensor.
    pub(super) fn floats(&self) -> DevicePtr<f32> {
        assert_eq!(self.kind, TensorKind::F32);
        self.buffer.ptr()
    }

    /// The values of a Compute tensor.
    pub(super) fn values(&self) -> DevicePtr<T> {
        assert_eq!(self.kind, TensorKind::Compute);
        self.buffer.ptr()
    }

    /// Bytes of a value.
    pub(super) fn value_bytes(kind: TensorKind) -> usize {
        match kind {
            TensorKind::F32 => size_of::<f32>(),
            TensorKind::Compute => size_of::<T>(),
        }
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes()
    }
}

/// `[n, k]`, row-major; rows beyond `n`, up to a multiple of 16, are zeros.
pub struct CudaMatrix<T> {
    pub(super) buffer: DeviceBuffer,
    pub(super) layout: crate::ops::MatrixLayout,
    /// Rows of the model.
    pub(super) n: usize,
    /// Rows there are.
    pub(super) padded_n: usize,
    pub(super) k: usize,
    pub(super) element: PhantomData<fn() -> T>,
}

impl<T: Compute> CudaMatrix<T> {
    pub(super) fn values(&self) -> DevicePtr<T> {
        self.buffer.ptr()
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes()
    }
}

/// `[len]` f32, with zeros up to a multiple of 16.
pub struct CudaVector {
    pub(super) buffer: DeviceBuffer,
}

impl CudaVector {
    pub(super) fn values(&self) -> DevicePtr<f32> {
        self.buffer.ptr()
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes()
    }
}

impl fmt::Debug for CudaVector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaVector({} bytes)", self.buffer.bytes())
    }
}

/// `[layer][block][2][kv_head][block_size][head_dim]`.
pub struct CudaKvCache<T> {
    pub(super) context: Context,
    pub(super) buffer: DeviceBuffer,
    pub(super) layout: KvLayout,
    pub(super) element: PhantomData<fn() -> T>,
}

impl<T: Element> CudaKvCache<T> {
    /// The blocks of a layer.
    pub(super) fn layer(&self, layer: usize) -> DevicePtr<T> {
        assert!(layer < self.layout.num_layers);
        self.buffer.ptr_at(layer * self.layout.num_blocks * layer_block_bytes(&self.layout))
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes()
    }

    /// Sets every byte; waits for the device before and after.
    ///
    /// # Errors
    /// The device failed.
    pub fn fill(&mut self, byte: u8) -> Result<(), CudaError> {
        self.context.synchronize()?;
        let bytes = vec![byte; self.buffer.bytes()];
        self.context.stream()?.upload_now(&bytes, &self.buffer, 0)
    }

    /// The bytes of a block, layer by layer; waits for the device.
    ///
    /// # Errors
    /// The device failed.
    pub fn block(&self, block: u32) -> Result<Vec<u8>, CudaError> {
        self.context.synchronize()?;
        let (stream, bytes) = (self.context.stream()?, layer_block_bytes(&self.layout));
        let mut out = vec![0; bytes * self.layout.num_layers];
        for (layer, out) in out.chunks_exact_mut(bytes).enumerate() {
            let at = (layer * self.layout.num_blocks + block as usize) * bytes;
            stream.download_now(&self.buffer, at..at + bytes, out)?;
        }
        Ok(out)
    }
}

/// Blocks in page-locked memory of the host: `[block][layer][2][kv_head][block_size][head_dim]`.
pub struct CudaHostCache {
    pub(super) buffer: PinnedBuffer,
    /// Bytes of a block, all layers.
    pub(super) block_bytes: usize,
}

impl CudaHostCache {
    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.buffer.len()
    }

    /// Sets every byte, once no copy is under way.
    ///
    /// # Errors
    /// The device failed.
    pub fn fill(&mut self, byte: u8) -> Result<(), CudaError> {
        self.buffer.bytes_mut()?.fill(byte);
        Ok(())
    }

    /// The bytes of a block, layer by layer, once no copy is under way.
    ///
    /// # Errors
    /// The device failed.
    pub fn block(&self, block: u32) -> Result<Vec<u8>, CudaError> {
        let at = block as usize * self.block_bytes;
        Ok(self.buffer.bytes()?[at..][..self.block_bytes].to_vec())
    }
}

/// Bytes of a block in one layer.
pub(super) fn layer_block_bytes(layout: &KvLayout) -> usize {
    let KvLayout { block_size, num_kv_heads, head_dim, dtype, .. } = layout;
    2 * num_kv_heads * block_size * head_dim * dtype.size()
}
