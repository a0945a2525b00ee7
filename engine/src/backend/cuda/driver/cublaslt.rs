//! Matrix products by NVIDIA's cuBLASLt, for those who choose it.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;

use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtContext, cublasLtEpilogue_t, cublasLtHandle_t,
    cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t,
    cublasLtMatmulDescOpaque_t, cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cublasLtMatrixLayoutOpaque_t,
    cublasStatus_t, cudaDataType, cudaDataType_t, cudaStream_t,
};
use quire_kernels_ptx::{DType, DevicePtr};

use super::Handle;
use super::context::Context;
use super::memory::DeviceBuffer;
use super::stream::{Stream, StreamId};
use super::symbols::{Driver, c_library};
use crate::backend::cuda::error::CudaError;

/// Scratch memory of the products; NVIDIA's advice for its larger devices.
pub(crate) const CUBLAS_BYTES: usize = 32 << 20;

/// Products whose algorithm is kept. A model has few shapes but for the number of tokens.
const MAX_PLANS: usize = 4096;

/// Alignment beyond which algorithms do not differ.
const MAX_ALIGNMENT: u32 = 256;

/// `CUBLAS_OP_T`, which cudarc has in its cuBLAS alone.
const TRANSPOSED: u32 = 1;

/// `CUBLAS_STATUS_ALLOC_FAILED`.
const ALLOC_FAILED: u32 = 3;
/// `CUBLAS_STATUS_NOT_SUPPORTED`.
const NOT_SUPPORTED: u32 = 15;

c_library! {
    Library, cublasStatus_t;
    fn cublasLtCreate(handle: *mut cublasLtHandle_t);
    fn cublasLtDestroy(handle: cublasLtHandle_t);
    fn cublasLtMatmulDescCreate(
        desc: *mut cublasLtMatmulDesc_t, compute: cublasComputeType_t, scale: cudaDataType_t
    );
    fn cublasLtMatmulDescDestroy(desc: cublasLtMatmulDesc_t);
    fn cublasLtMatmulDescSetAttribute(
        desc: cublasLtMatmulDesc_t,
        attribute: cublasLtMatmulDescAttributes_t,
        value: *const c_void,
        bytes: usize
    );
    fn cublasLtMatrixLayoutCreate(
        layout: *mut cublasLtMatrixLayout_t, dtype: cudaDataType, rows: u64, cols: u64, ld: i64
    );
    fn cublasLtMatrixLayoutDestroy(layout: cublasLtMatrixLayout_t);
    fn cublasLtMatmulPreferenceCreate(preference: *mut cublasLtMatmulPreference_t);
    fn cublasLtMatmulPreferenceDestroy(preference: cublasLtMatmulPreference_t);
    fn cublasLtMatmulPreferenceSetAttribute(
        preference: cublasLtMatmulPreference_t,
        attribute: cublasLtMatmulPreferenceAttributes_t,
        value: *const c_void,
        bytes: usize
    );
    fn cublasLtMatmulAlgoGetHeuristic(
        handle: cublasLtHandle_t,
        desc: cublasLtMatmulDesc_t,
        a: cublasLtMatrixLayout_t,
        b: cublasLtMatrixLayout_t,
        c: cublasLtMatrixLayout_t,
        d: cublasLtMatrixLayout_t,
        preference: cublasLtMatmulPreference_t,
        wanted: c_int,
        results: *mut cublasLtMatmulHeuristicResult_t,
        found: *mut c_int
    );
    fn cublasLtMatmul(
        handle: cublasLtHandle_t,
        desc: cublasLtMatmulDesc_t,
        alpha: *const c_void,
        a: *const c_void,
        a_layout: cublasLtMatrixLayout_t,
        b: *const c_void,
        b_layout: cublasLtMatrixLayout_t,
        beta: *const c_void,
        c: *const c_void,
        c_layout: cublasLtMatrixLayout_t,
        d: *mut c_void,
        d_layout: cublasLtMatrixLayout_t,
        algorithm: *const cublasLtMatmulAlgo_t,
        workspace: *mut c_void,
        workspace_bytes: usize,
        stream: cudaStream_t
    );
    raw
}

impl Library {
    /// The library, loaded by the first call.
    fn get() -> Result<&'static Library, CudaError> {
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        if let Some(library) = LIBRARY.get() {
            return Ok(library);
        }
        // SAFETY: runs the initialisers of the library that the system names `libcublasLt.so`.
        if !unsafe { sys::is_culib_present() } {
            let reason = "no cuBLASLt found (libcublasLt.so); install NVIDIA's cuBLAS, or use \
                          --gemm triton";
            return Err(CudaError::Unsupported { reason: reason.to_owned() });
        }
        let library = Library::load()?;
        Ok(LIBRARY.get_or_init(|| library))
    }

    /// What a status that is not 0 means.
    fn error(&self, call: &'static str, code: u32) -> CudaError {
        let name = match code {
            1 => "CUBLAS_STATUS_NOT_INITIALIZED",
            ALLOC_FAILED => {
                let free = Driver::get().map_or(0, Driver::free_bytes);
                return CudaError::OutOfMemory { what: "cuBLASLt".to_owned(), bytes: 0, free };
            }
            7 => "CUBLAS_STATUS_INVALID_VALUE",
            8 => "CUBLAS_STATUS_ARCH_MISMATCH",
            11 => "CUBLAS_STATUS_MAPPING_ERROR",
            13 => "CUBLAS_STATUS_EXECUTION_FAILED",
            14 => "CUBLAS_STATUS_INTERNAL_ERROR",
            NOT_SUPPORTED => "CUBLAS_STATUS_NOT_SUPPORTED",
            16 => "CUBLAS_STATUS_LICENSE_ERROR",
            _ => "an unknown status",
        };
        let message = "try --gemm triton".to_owned();
        CudaError::Driver { call, code, name: name.to_owned(), message }
    }
}

/// The function of that name.
///
/// # Safety
/// `F` is a function pointer of its type, and the library is present.
unsafe fn symbol<F: Copy>(name: &'static str) -> Result<F, CudaError> {
    // SAFETY: the library is present; it is never unloaded again, so the pointer stays valid.
    let library = unsafe { sys::culib() };
    // SAFETY: `F` is the type of the function.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| {
        let reason = format!("cuBLASLt lacks {name}; update it, or use --gemm triton");
        CudaError::Unsupported { reason }
    })
}

/// `out[m, n] = x[m, k] · w[n, k]ᵀ (+ bias[n]) (+ out)`, all row-major, accumulated in f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatmulArgs {
    /// `[m, n]`, rows `out_stride` elements apart.
    pub(crate) out: DevicePtr<f32>,
    /// Address of `[m, k]`, rows `x_stride` elements apart.
    pub(crate) x: u64,
    /// Address of `[n, k]`.
    pub(crate) w: u64,
    /// Type of `x` and `w`: bf16, f16 or f32.
    pub(crate) dtype: DType,
    /// Rows of `x`.
    pub(crate) m: usize,
    /// Rows of `w`.
    pub(crate) n: usize,
    /// Columns of both.
    pub(crate) k: usize,
    /// Elements from one row of `x` to the next.
    pub(crate) x_stride: usize,
    /// Elements from one row of `out` to the next.
    pub(crate) out_stride: usize,
    /// Address of f32 `[n]`.
    pub(crate) bias: Option<u64>,
    /// Adds to what is in `out`.
    pub(crate) accumulate: bool,
}

/// cuBLASLt on one device, for one stream. It gives up batch invariance: the algorithm, and so the
/// order of a sum, depends on the number of rows.
pub(crate) struct CublasLt {
    context: Context,
    library: &'static Library,
    handle: Handle<cublasLtContext>,
    workspace: DeviceBuffer,
    plans: HashMap<Shape, Plan>,
    /// The stream of all calls, as they share the workspace.
    stream: Option<StreamId>,
}

impl CublasLt {
    /// Loads the library.
    ///
    /// # Errors
    /// It is not there, or there is no memory for its workspace.
    pub(crate) fn new(context: &Context) -> Result<Self, CudaError> {
        let library = Library::get()?;
        let workspace = context.alloc(CUBLAS_BYTES, "the workspace of cuBLASLt")?;
        context.bind()?;
        let mut handle: cublasLtHandle_t = ptr::null_mut();
        // SAFETY: the handle is written to at most; the context is current.
        unsafe { library.cublasLtCreate(&mut handle) }?;
        let (context, handle) = (context.clone(), Handle(handle));
        Ok(CublasLt { context, library, handle, workspace, plans: HashMap::new(), stream: None })
    }

    /// Enqueues a product; it may be captured. As with a launch, the addresses are the caller's.
    ///
    /// # Errors
    /// cuBLASLt has no algorithm for it, or what it says.
    pub(crate) fn matmul(&mut self, stream: &Stream, args: MatmulArgs) -> Result<(), CudaError> {
        assert_eq!(*self.stream.get_or_insert(stream.id()), stream.id(), "products on one stream");
        if args.m == 0 || args.n == 0 {
            return Ok(());
        }
        self.context.bind()?;
        let shape = Shape::new(&args);
        if !self.plans.contains_key(&shape) {
            if self.plans.len() == MAX_PLANS {
                self.plans.clear();
            }
            self.plans.insert(shape, Plan::new(self.library, self.handle.0, &shape)?);
        }
        let plan = &self.plans[&shape];
        if let Some(bias) = args.bias {
            plan.desc
                .set(cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)?;
        }
        let (alpha, beta) = (1f32, if args.accumulate { 1f32 } else { 0f32 });
        let out = address(args.out.address()).cast_mut();
        // SAFETY: the handle, the description, the layouts and the algorithm are the plan's and
        // live; alpha and beta are read before the call returns, as scalars of the host are; the
        // workspace has as many bytes. What is at the addresses is the caller's.
        unsafe {
            self.library.cublasLtMatmul(
                self.handle.0,
                plan.desc.desc.0,
                ptr::from_ref(&alpha).cast(),
                address(args.w),
                plan.w.layout.0,
                address(args.x),
                plan.x.layout.0,
                ptr::from_ref(&beta).cast(),
                out,
                plan.out.layout.0,
                out,
                plan.out.layout.0,
                &plan.algorithm,
                address(self.workspace.address()).cast_mut(),
                CUBLAS_BYTES,
                stream.handle().cast(),
            )
        }
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: created by `new`, destroyed here alone.
        let _ = unsafe { self.library.cublasLtDestroy(self.handle.0) };
    }
}

/// What an algorithm is chosen by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    m: usize,
    n: usize,
    k: usize,
    x_stride: usize,
    out_stride: usize,
    dtype: DType,
    has_bias: bool,
    /// Bytes that the addresses of w, x and out are multiples of.
    alignments: [u32; 3],
}

impl Shape {
    fn new(args: &MatmulArgs) -> Self {
        let &MatmulArgs { m, n, k, x_stride, out_stride, dtype, .. } = args;
        assert!(k > 0 && x_stride >= k && out_stride >= n, "{args:?}");
        let alignments = [args.w, args.x, args.out.address()].map(alignment);
        Shape { m, n, k, x_stride, out_stride, dtype, has_bias: args.bias.is_some(), alignments }
    }
}

/// A product that is ready to be enqueued. The library's matrices are column-major, so its `A` is
/// `wᵀ`, its `B` is `xᵀ`, and `outᵀ = (wᵀ)ᵀ · xᵀ`: the same memory, no copy.
struct Plan {
    desc: Desc,
    w: Layout,
    x: Layout,
    out: Layout,
    algorithm: cublasLtMatmulAlgo_t,
}

impl Plan {
    fn new(
        library: &'static Library,
        handle: cublasLtHandle_t,
        shape: &Shape,
    ) -> Result<Self, CudaError> {
        let &Shape { m, n, k, x_stride, out_stride, dtype, .. } = shape;
        let input = data_type(dtype)?;
        let desc = Desc::new(library, shape.has_bias)?;
        let w = Layout::new(library, input, [k, n], k)?;
        let x = Layout::new(library, input, [k, m], x_stride)?;
        let out = Layout::new(library, cudaDataType_t::CUDA_R_32F, [n, m], out_stride)?;
        let preference = Preference::new(library, shape.alignments)?;
        let mut result = MaybeUninit::<cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut found = 0;
        // SAFETY: everything was created above and lives; one result is written to at most.
        let searched = unsafe {
            library.cublasLtMatmulAlgoGetHeuristic(
                handle,
                desc.desc.0,
                w.layout.0,
                x.layout.0,
                out.layout.0,
                out.layout.0,
                preference.0.0,
                1,
                result.as_mut_ptr(),
                &mut found,
            )
        };
        match searched {
            Err(CudaError::Driver { code: NOT_SUPPORTED, .. }) => found = 0,
            searched => searched?,
        }
        // The state is a number here, as a status may be one that its type does not have.
        // SAFETY: all zeros, or written by the library; a field of 32 bits.
        let state = unsafe { (&raw const (*result.as_ptr()).state).cast::<u32>().read() };
        if found < 1 || state != 0 {
            let reason = format!(
                "cuBLASLt has no product of {m}x{k} and {n}x{k} in {dtype}; use --gemm triton"
            );
            return Err(CudaError::Unsupported { reason });
        }
        // SAFETY: all zeros, or written by the library; any numbers are an algorithm to the type.
        let algorithm = unsafe { (&raw const (*result.as_ptr()).algo).read() };
        Ok(Plan { desc, w, x, out, algorithm })
    }
}

/// Description of a product: transposed `A`, f32 inside, perhaps a bias.
struct Desc {
    library: &'static Library,
    desc: Handle<cublasLtMatmulDescOpaque_t>,
}

impl Desc {
    fn new(library: &'static Library, has_bias: bool) -> Result<Self, CudaError> {
        use cublasLtMatmulDescAttributes_t::*;
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let mut desc: cublasLtMatmulDesc_t = ptr::null_mut();
        // SAFETY: the description is written to at most.
        unsafe {
            library.cublasLtMatmulDescCreate(&mut desc, compute, cudaDataType_t::CUDA_R_32F)
        }?;
        let desc = Desc { library, desc: Handle(desc) };
        desc.set(CUBLASLT_MATMUL_DESC_TRANSA, TRANSPOSED)?;
        if has_bias {
            let epilogue = cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            desc.set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
        }
        Ok(desc)
    }

    fn set<T: Copy>(
        &self,
        attribute: cublasLtMatmulDescAttributes_t,
        value: T,
    ) -> Result<(), CudaError> {
        let (value, bytes) = (ptr::from_ref(&value).cast(), size_of::<T>());
        // SAFETY: the value has as many bytes and is copied; the library checks how many it needs.
        unsafe { self.library.cublasLtMatmulDescSetAttribute(self.desc.0, attribute, value, bytes) }
    }
}

impl Drop for Desc {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed here alone.
        let _ = unsafe { self.library.cublasLtMatmulDescDestroy(self.desc.0) };
    }
}

/// Layout of a column-major matrix.
struct Layout {
    library: &'static Library,
    layout: Handle<cublasLtMatrixLayoutOpaque_t>,
}

impl Layout {
    fn new(
        library: &'static Library,
        dtype: cudaDataType,
        [rows, cols]: [usize; 2],
        stride: usize,
    ) -> Result<Self, CudaError> {
        let mut layout: cublasLtMatrixLayout_t = ptr::null_mut();
        let (rows, cols, stride) = (rows as u64, cols as u64, stride as i64);
        // SAFETY: the layout is written to at most.
        unsafe { library.cublasLtMatrixLayoutCreate(&mut layout, dtype, rows, cols, stride) }?;
        Ok(Layout { library, layout: Handle(layout) })
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed here alone.
        let _ = unsafe { self.library.cublasLtMatrixLayoutDestroy(self.layout.0) };
    }
}

/// What an algorithm may use and count on.
struct Preference(Handle<sys::cublasLtMatmulPreferenceOpaque_t>, &'static Library);

impl Preference {
    fn new(library: &'static Library, [w, x, out]: [u32; 3]) -> Result<Self, CudaError> {
        use cublasLtMatmulPreferenceAttributes_t::*;
        let mut preference: cublasLtMatmulPreference_t = ptr::null_mut();
        // SAFETY: the preference is written to at most.
        unsafe { library.cublasLtMatmulPreferenceCreate(&mut preference) }?;
        let preference = Preference(Handle(preference), library);
        preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CUBLAS_BYTES as u64)?;
        preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, w)?;
        preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, x)?;
        preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out)?;
        preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out)?;
        Ok(preference)
    }

    fn set<T: Copy>(
        &self,
        attribute: cublasLtMatmulPreferenceAttributes_t,
        value: T,
    ) -> Result<(), CudaError> {
        let (value, bytes) = (ptr::from_ref(&value).cast(), size_of::<T>());
        // SAFETY: the value has as many bytes and is copied; the library checks how many it needs.
        unsafe { self.1.cublasLtMatmulPreferenceSetAttribute(self.0.0, attribute, value, bytes) }
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed here alone.
        let _ = unsafe { self.1.cublasLtMatmulPreferenceDestroy(self.0.0) };
    }
}

fn data_type(dtype: DType) -> Result<cudaDataType, CudaError> {
    match dtype {
        DType::Bf16 => Ok(cudaDataType_t::CUDA_R_16BF),
        DType::F16 => Ok(cudaDataType_t::CUDA_R_16F),
        DType::F32 => Ok(cudaDataType_t::CUDA_R_32F),
        other => {
            let reason = format!("no product of {other} with cuBLASLt; use --gemm triton");
            Err(CudaError::Unsupported { reason })
        }
    }
}

/// The largest power of two that an address is a multiple of, up to where it matters.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(MAX_ALIGNMENT.trailing_zeros())
}

/// A device's address as the library takes it.
fn address(address: u64) -> *const c_void {
    ptr::without_provenance(address as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_algorithm_counts_on_no_more_than_the_alignment_there_is() {
        let cases =
            [(0x1000, 256), (0x1010, 16), (0x1100, 256), (0x1080, 128), (0x1002, 2), (0, 256)];
        for (address, expected) in cases {
            assert_eq!(alignment(address), expected, "{address:#x}");
        }
    }
}
