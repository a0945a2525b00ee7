//! Matrix products: which kernel, and over which grid.
//!
//! All of them have the same bits for a row ([`GemmMode::Triton`](crate::backend::GemmMode)): many rows go
//! through one kernel, few through one that spreads the chunks of K over the device, with a second
//! that adds them in order.

use super::arena::Layout;
use super::driver::{DeviceBuffer, MatmulArgs};
use super::element::Compute;
use super::error::CudaError;
use super::launcher::{Kernel, Launcher, Work};
use super::tensors::{CudaMatrix, CudaTensor, CudaVector};
use super::{CudaBackend, SCRATCH_BYTES};
use crate::ops::{DType, MatrixLayout};
use quire_kernels_ptx::DevicePtr;
use quire_kernels_ptx::launch::{
    FoldPartials, FoldSiluMul, Gemm, GemmPartial, GemmSiluMul, SiluMul,
};

/// Rows up to which a weight is read as fast as memory gives it, so that the chunks of K are worth
/// spreading.
const FEW_ROWS: usize = 16;
/// Rows up to which spreading may be worth it where there are few columns.
const MEDIUM_ROWS: usize = 64;

/// The kernels of matrix products.
pub(super) struct GemmKernels<T: Compute> {
    gemm: Kernel<Gemm<T>>,
    gemm_silu_mul: Kernel<GemmSiluMul<T>>,
    /// For up to [`FEW_ROWS`] rows.
    few: Kernel<GemmPartial<T>>,
    /// For up to [`MEDIUM_ROWS`] rows.
    medium: Option<Kernel<GemmPartial<T>>>,
    fold: Kernel<FoldPartials>,
    fold_silu_mul: Kernel<FoldSiluMul<T>>,
    multiprocessors: usize,
}

impl<T: Compute> GemmKernels<T> {
    pub fn new(launcher: &mut Launcher) -> Result<Self, CudaError> {
        let rows = |n: usize| [("BLOCK_T", n as i64)];
        Ok(GemmKernels {
            gemm: launcher.select(&[])?,
            gemm_silu_mul: launcher.select(&[])?,
            few: launcher.select(&rows(FEW_ROWS))?,
            // f32 is for tests and small models: it has no kernel for so many rows.
            medium: (T::COMPUTE != DType::F32)
                .then(|| launcher.select(&rows(MEDIUM_ROWS)))
                .transpose()?,
            fold: launcher.select(&[])?,
            fold_silu_mul: launcher.select(&[])?,
            multiprocessors: launcher.context().info().num_multiprocessors as usize,
        })
    }

    /// The kernel that spreads K, where it is worth it for `m` rows and `n` columns.
    fn spread(&self, m: usize, n: usize) -> Option<Kernel<GemmPartial<T>>> {
        if m <= FEW_ROWS {
            return Some(self.few);
        }
        let tiles = n.div_ceil(self.gemm.tile("BLOCK_N"));
        self.medium.filter(|_| m <= MEDIUM_ROWS && tiles < 2 * self.multiprocessors)
    }
}

/// Bytes and operations of `y[m, n] = x[m, k] Wᵀ`.
fn work<T>(m: usize, n: usize, k: usize, out_bytes: usize) -> impl FnOnce() -> Work {
    let bytes = (m * k + n * k) * size_of::<T>() + out_bytes;
    move || Work { bytes: bytes as u64, flops: 2 * (m * n * k) as u64 }
}

/// `x Wᵀ` spread over chunks of K: `partial[num_chunks, m, n]`.
struct Spread<T: Compute> {
    kernel: Kernel<GemmPartial<T>>,
    num_chunks: usize,
    m: usize,
    k: usize,
}

impl<T: Compute> Spread<T> {
    fn new(kernel: Kernel<GemmPartial<T>>, m: usize, k: usize) -> Self {
        Spread { kernel, num_chunks: k.div_ceil(kernel.tile("CHUNK")), m, k }
    }

    /// Columns of which the scratch memory holds the chunks.
    fn columns(&self) -> usize {
        let columns = SCRATCH_BYTES / (self.num_chunks * self.m * size_of::<f32>());
        columns / self.kernel.tile("BLOCK_N") * self.kernel.tile("BLOCK_N")
    }

    fn launch(
        &self,
        launcher: &mut Launcher,
        scratch: &DeviceBuffer,
        (x, x_stride): (DevicePtr<T>, usize),
        (w, n): (DevicePtr<T>, usize),
    ) {
        let Spread { kernel, num_chunks, m, k } = *self;
        let args = GemmPartial {
            partial: scratch.ptr(),
            x,
            w,
            num_rows: m as i32,
            num_n: n as i32,
            num_k: k as i32,
            x_stride: x_stride as i32,
        };
        let (columns, rows) = (kernel.tile("BLOCK_N"), kernel.tile("BLOCK_T"));
        let grid = [n.div_ceil(columns), num_chunks, m.div_ceil(rows)];
        launcher.launch(kernel, grid, &args, work::<T>(m, n, k, 4 * num_chunks * m * n));
    }
}

/// `base + index` elements.
fn at<T>(base: DevicePtr<T>, index: usize) -> DevicePtr<T> {
    DevicePtr::new(base.address() + (index * size_of::<T>()) as u64)
}

impl<T: Compute> CudaBackend<T> {
    /// `out = x Wᵀ + bias`, or added to `out`.
    pub(super) fn multiply(
        &mut self,
        x: &CudaTensor<T>,
        w: &CudaMatrix<T>,
        bias: Option<&CudaVector>,
        out: &CudaTensor<T>,
        accumulate: bool,
    ) {
        assert_eq!((w.layout, w.n), (MatrixLayout::Plain, out.cols));
        assert_eq!((x.stride, out.stride), (w.k, w.padded_n));
        if self.cublas.is_some() {
            return self.multiply_cublas(x, w, bias, out, accumulate);
        }
        match self.gemm.spread(x.rows, w.padded_n) {
            Some(kernel) => self.multiply_spread(kernel, x, w, (bias, out, accumulate)),
            None => self.multiply_tiled(x, w, (bias, out, accumulate)),
        }
    }

    fn multiply_tiled(
        &mut self,
        x: &CudaTensor<T>,
        w: &CudaMatrix<T>,
        (bias, out, accumulate): (Option<&CudaVector>, &CudaTensor<T>, bool),
    ) {
        let (m, n, k) = (x.rows, w.padded_n, w.k);
        let args = Gemm {
            out: out.floats(),
            x: x.values(),
            w: w.values(),
            bias: bias.map_or(DevicePtr::null(), CudaVector::values),
            num_rows: m as i32,
            num_n: n as i32,
            num_k: k as i32,
            x_stride: x.stride as i32,
            out_stride: out.stride as i32,
            has_bias: bias.is_some().into(),
            accumulate: accumulate.into(),
        };
        let kernel = self.gemm.gemm;
        let tiles = m.div_ceil(kernel.tile("BLOCK_T")) * n.div_ceil(kernel.tile("BLOCK_N"));
        let out_bytes = 4 * m * n * (1 + usize::from(accumulate));
        self.launcher.launch(kernel, [tiles, 1, 1], &args, work::<T>(m, n, k, out_bytes));
    }

    fn multiply_spread(
        &mut self,
        kernel: Kernel<GemmPartial<T>>,
        x: &CudaTensor<T>,
        w: &CudaMatrix<T>,
        (bias, out, accumulate): (Option<&CudaVector>, &CudaTensor<T>, bool),
    ) {
        let spread = Spread::new(kernel, x.rows, w.k);
        for start in (0..w.padded_n).step_by(spread.columns()) {
            let n = spread.columns().min(w.padded_n - start);
            let panel = (at(w.values(), start * w.k), n);
            spread.launch(&mut self.launcher, &self.scratch, (x.values(), x.stride), panel);
            let args = FoldPartials {
                out: at(out.floats(), start),
                partial: self.scratch.ptr(),
                bias: bias.map_or(DevicePtr::null(), |bias| at(bias.values(), start)),
                num_rows: x.rows as i32,
                num_n: n as i32,
                num_chunks: spread.num_chunks as i32,
                out_stride: out.stride as i32,
                has_bias: bias.is_some().into(),
                accumulate: accumulate.into(),
            };
            let fold = self.gemm.fold;
            let passes = spread.num_chunks + 1 + usize::from(accumulate);
            let work = || Work::bytes(4 * x.rows * n * passes);
            let grid = [x.rows, n.div_ceil(fold.tile("BLOCK_N")), 1];
            self.launcher.launch(fold, grid, &args, work);
        }
    }

    /// `out = silu(x Wgateᵀ) · (x Wupᵀ)`.
    pub(super) fn multiply_gate_up(
        &mut self,
        x: &CudaTensor<T>,
        w: &CudaMatrix<T>,
        out: &CudaTensor<T>,
    ) {
        assert_eq!((w.layout, w.n), (MatrixLayout::GateUp, 2 * out.cols));
        assert_eq!((x.stride, out.stride), (w.k, out.cols));
        if self.cublas.is_some() {
            return self.gate_up_cublas(x, w, out);
        }
        let spread = self.gemm.spread(x.rows, w.n / 2);
        let spread = spread.map(|kernel| Spread::new(kernel, x.rows, w.k));
        // The halves are folded together, so both have to fit.
        match spread.filter(|spread| spread.columns() >= w.n) {
            Some(spread) => self.gate_up_spread(&spread, x, w, out),
            None => self.gate_up_tiled(x, w, out),
        }
    }

    fn gate_up_tiled(&mut self, x: &CudaTensor<T>, w: &CudaMatrix<T>, out: &CudaTensor<T>) {
        let (m, n, k) = (x.rows, w.n, w.k);
        let args = GemmSiluMul {
            out: out.values(),
            x: x.values(),
            w: w.values(),
            num_rows: m as i32,
            num_n: n as i32,
            num_k: k as i32,
            x_stride: x.stride as i32,
            out_stride: out.stride as i32,
        };
        let kernel = self.gemm.gemm_silu_mul;
        let tiles = m.div_ceil(kernel.tile("BLOCK_T")) * (n / 2).div_ceil(kernel.tile("BLOCK_N"));
        let work = work::<T>(m, n, k, m * n / 2 * size_of::<T>());
        self.launcher.launch(kernel, [tiles, 1, 1], &args, work);
    }

    fn gate_up_spread(
        &mut self,
        spread: &Spread<T>,
        x: &CudaTensor<T>,
        w: &CudaMatrix<T>,
        out: &CudaTensor<T>,
    ) {
        let (m, n) = (x.rows, w.n);
        spread.launch(&mut self.launcher, &self.scratch, (x.values(), x.stride), (w.values(), n));
        let args = FoldSiluMul {
            out: out.values(),
            partial: self.scratch.ptr(),
            num_rows: m as i32,
            num_n: n as i32,
            num_chunks: spread.num_chunks as i32,
            out_stride: out.stride as i32,
        };
        let fold = self.gemm.fold_silu_mul;
        let bytes = 4 * spread.num_chunks * m * n + m * n / 2 * size_of::<T>();
        let grid = [m, (n / 2).div_ceil(fold.tile("BLOCK_N")), 1];
        self.launcher.launch(fold, grid, &args, || Work::bytes(bytes));
    }

    fn multiply_cublas(
        &mut self,
        x: &CudaTensor<T>,
        w: &CudaMatrix<T>,
        bias: Option<&CudaVector>,
        out: &CudaTensor<T>,
        accumulate: bool,
    ) {
        let args = MatmulArgs {
            out: out.floats(),
            x: x.values().address(),
            w: w.values().address(),
            dtype: T::DTYPE,
            m: x.rows,
            n: w.padded_n,
            k: w.k,
            x_stride: x.stride,
            out_stride: out.stride,
            bias: bias.map(|bias| bias.values().address()),
            accumulate,
        };
        let cublas = self.cublas.as_mut().expect("cuBLASLt was asked for");
        self.launcher.enqueue(|stream| cublas.matmul(stream, args));
    }

    fn gate_up_cublas(&mut self, x: &CudaTensor<T>, w: &CudaMatrix<T>, out: &CudaTensor<T>) {
        let mut layout = Layout::default();
        layout.array::<f32>(w.n);
        let rows = (SCRATCH_BYTES / layout.bytes()).min(x.rows).max(1);
        for start in (0..x.rows).step_by(rows) {
            let m = rows.min(x.rows - start);
            let args = MatmulArgs {
                out: self.scratch.ptr(),
                x: at(x.values(), start * x.stride).address(),
                w: w.values().address(),
                dtype: T::DTYPE,
                m,
                n: w.n,
                k: w.k,
                x_stride: x.stride,
                out_stride: w.n,
                bias: None,
                accumulate: false,
            };
            let cublas = self.cublas.as_mut().expect("cuBLASLt was asked for");
            self.launcher.enqueue(|stream| cublas.matmul(stream, args));
            let width = w.n / 2;
            let args = SiluMul {
                out: at(out.values(), start * out.stride),
                gate_up: self.scratch.ptr(),
                width: width as i32,
            };
            let kernel = self.kernels.silu_mul;
            let bytes = m * width * (8 + size_of::<T>());
            let grid = [m, width.div_ceil(kernel.tile("BLOCK")), 1];
            self.launcher.launch(kernel, grid, &args, || Work::bytes(bytes));
        }
    }
}
