//! The part of cuBLASLt that one product after the other needs. The library of that name is this
//! one, so that products run in the streams and the memory of the driver.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::code::{self, Code};
use crate::config::Call;
use crate::driver::{self, Driver};
use crate::host::put;
use crate::matmul::{Element, Layout, Matmul, Matrix, Operation, check_layouts};
use crate::work::Work;

/// An object of the library.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Object {
    Library,
    Layout(Layout),
    Operation(Operation),
    Preference,
}

/// A status that is not success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Status(c_int);

const NOT_INITIALIZED: Status = Status(1);
const INVALID_VALUE: Status = Status(7);
const EXECUTION_FAILED: Status = Status(13);
const NOT_SUPPORTED: Status = Status(15);

type Result<T = ()> = std::result::Result<T, Status>;

impl From<Code> for Status {
    fn from(code: Code) -> Status {
        match code {
            code::INVALID_VALUE | code::INVALID_HANDLE => INVALID_VALUE,
            _ => EXECUTION_FAILED,
        }
    }
}

/// Numbers of `CUBLAS_COMPUTE_32F`, the same where inputs may be rounded to TF32 (here they are not),
/// `CUDA_R_32F`, and the epilogues nothing and bias.
const COMPUTE_32F: u32 = 68;
const COMPUTE_32F_FAST_TF32: u32 = 77;
const R_32F: u32 = 0;
const EPILOGUE_DEFAULT: u32 = 1;
const EPILOGUE_BIAS: u32 = 4;

fn call(call: impl FnOnce(&mut Driver) -> Result) -> c_int {
    call(&mut driver::lock()).map_or_else(|Status(status)| status, |()| 0)
}

/// Makes an object and stores its handle.
///
/// # Safety
/// `to` is null or may be written.
unsafe fn create(to: *mut u64, make: impl FnOnce(&Driver) -> Result<Object>) -> c_int {
    call(|driver| {
        let object = make(driver)?;
        let handle = driver.new_handle();
        // SAFETY: the caller's promise.
        unsafe { put(to, handle) }?;
        driver.blas.insert(handle, object);
        Ok(())
    })
}

fn destroy(handle: u64, is_of_the_kind: impl FnOnce(&Object) -> bool) -> c_int {
    call(|driver| match driver.blas.get(&handle) {
        Some(object) if is_of_the_kind(object) => {
            driver.blas.remove(&handle);
            Ok(())
        }
        _ => Err(INVALID_VALUE),
    })
}

/// # Safety
/// `handle` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtCreate(handle: *mut u64) -> c_int {
    let make = |driver: &Driver| match driver.usable_device() {
        Ok(_) => Ok(Object::Library),
        Err(_) => Err(NOT_INITIALIZED),
    };
    // SAFETY: the caller's promise.
    unsafe { create(handle, make) }
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtDestroy(handle: u64) -> c_int {
    destroy(handle, |object| matches!(object, Object::Library))
}

/// # Safety
/// `layout` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatrixLayoutCreate(
    layout: *mut u64,
    element: u32,
    rows: u64,
    cols: u64,
    stride: i64,
) -> c_int {
    let make = |_: &Driver| {
        let element = Element::from_number(element).ok_or(NOT_SUPPORTED)?;
        let stride = usize::try_from(stride).map_err(|_| INVALID_VALUE)?;
        Ok(Object::Layout(Layout { element, rows: rows as usize, cols: cols as usize, stride }))
    };
    // SAFETY: the caller's promise.
    unsafe { create(layout, make) }
}

/// Attributes are those of batches, of which there is one.
///
/// # Safety
/// `value` is null or points to `bytes` readable bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatrixLayoutSetAttribute(
    layout: u64,
    attribute: u32,
    value: *const c_void,
    bytes: usize,
) -> c_int {
    call(|driver| {
        driver.layout(layout)?;
        match attribute {
            // SAFETY: the caller's promise.
            5 if unsafe { scalar::<u32>(value, bytes) }? == 1 => Ok(()),
            // The offset from one batch to the next.
            6 => Ok(()),
            _ => Err(NOT_SUPPORTED),
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatrixLayoutDestroy(layout: u64) -> c_int {
    destroy(layout, |object| matches!(object, Object::Layout(_)))
}

/// # Safety
/// `desc` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescCreate(desc: *mut u64, compute: u32, scale: u32) -> c_int {
    let make = |_: &Driver| match (compute, scale) {
        (COMPUTE_32F | COMPUTE_32F_FAST_TF32, R_32F) => Ok(Object::Operation(Operation::default())),
        _ => Err(NOT_SUPPORTED),
    };
    // SAFETY: the caller's promise.
    unsafe { create(desc, make) }
}

/// # Safety
/// `value` is null or points to `bytes` readable bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescSetAttribute(
    desc: u64,
    attribute: u32,
    value: *const c_void,
    bytes: usize,
) -> c_int {
    call(|driver| {
        let Some(Object::Operation(operation)) = driver.blas.get_mut(&desc) else {
            return Err(INVALID_VALUE);
        };
        // SAFETY: the caller's promise.
        let number = || unsafe { scalar::<u32>(value, bytes) };
        match attribute {
            // POINTER_MODE: α and β are the host's. TRANSC: never.
            2 | 5 if number()? == 0 => {}
            3 => operation.transposed_a = number()? != 0,
            4 => operation.transposed_b = number()? != 0,
            7 => match number()? {
                EPILOGUE_DEFAULT => operation.has_bias = false,
                EPILOGUE_BIAS => operation.has_bias = true,
                _ => return Err(NOT_SUPPORTED),
            },
            // SAFETY: the caller's promise.
            8 => operation.bias = unsafe { scalar(value, bytes) }?,
            _ => return Err(NOT_SUPPORTED),
        }
        Ok(())
    })
}

/// The value of an attribute.
///
/// # Safety
/// `value` is null or points to `bytes` readable bytes; any bytes are a `T`.
unsafe fn scalar<T: Copy>(value: *const c_void, bytes: usize) -> Result<T> {
    if value.is_null() || bytes != size_of::<T>() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: it is not null and has the size; the rest is the caller's promise.
    Ok(unsafe { value.cast::<T>().read_unaligned() })
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulDescDestroy(desc: u64) -> c_int {
    destroy(desc, |object| matches!(object, Object::Operation(_)))
}

/// # Safety
/// `preference` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulPreferenceCreate(preference: *mut u64) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { create(preference, |_| Ok(Object::Preference)) }
}

/// There is one algorithm, which uses no workspace and needs no alignment.
#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    preference: u64,
    _attribute: u32,
    value: *const c_void,
    _bytes: usize,
) -> c_int {
    call(|driver| match driver.blas.get(&preference) {
        Some(Object::Preference) if !value.is_null() => Ok(()),
        _ => Err(INVALID_VALUE),
    })
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulPreferenceDestroy(preference: u64) -> c_int {
    destroy(preference, |object| matches!(object, Object::Preference))
}

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct HeuristicResult {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// What stands in an algorithm that [`cublasLtMatmulAlgoGetHeuristic`] has found.
const ALGORITHM: [u64; 8] = [u64::from_le_bytes(*b"fakecuda"); 8];

/// # Safety
/// `results` is null or has room for `wanted`; `found` is null or may be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _handle: u64,
    desc: u64,
    a: u64,
    b: u64,
    c: u64,
    d: u64,
    _preference: u64,
    wanted: c_int,
    results: *mut HeuristicResult,
    found: *mut c_int,
) -> c_int {
    call(|driver| {
        driver.usable_device()?;
        if wanted < 1 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        unsafe { put(found, 0) }?;
        driver.product(desc, [a, b, c, d])?;
        let result = HeuristicResult {
            algorithm: ALGORITHM,
            workspace_bytes: 0,
            state: 0,
            waves: 1.0,
            reserved: [0; 4],
        };
        // SAFETY: the caller's promise; at least one is wanted.
        unsafe {
            put(results, result)?;
            put(found, 1)?;
        }
        Ok(())
    })
}

/// # Safety
/// `alpha` and `beta` are null or point to an f32 each; `algorithm` is null or points to one.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmul(
    handle: u64,
    desc: u64,
    alpha: *const c_void,
    a: u64,
    a_layout: u64,
    b: u64,
    b_layout: u64,
    beta: *const c_void,
    c: u64,
    c_layout: u64,
    d: u64,
    d_layout: u64,
    algorithm: *const [u64; 8],
    _workspace: u64,
    _workspace_bytes: usize,
    stream: u64,
) -> c_int {
    call(|driver| {
        let device = driver.usable_device()?;
        let stream = driver.stream(stream, device)?;
        // SAFETY: the caller's promise.
        let [alpha, beta] = unsafe { [scalar(alpha, 4)?, scalar(beta, 4)?] };
        // SAFETY: the caller's promise; it is not null.
        let known = algorithm.is_null() || unsafe { algorithm.read_unaligned() } == ALGORITHM;
        if !known || !matches!(driver.blas.get(&handle), Some(Object::Library)) {
            return Err(INVALID_VALUE);
        }
        let layouts = [a_layout, b_layout, c_layout, d_layout];
        let (operation, layouts) = driver.product(desc, layouts)?;
        let matrix = |i: usize, address: u64| Matrix { address, layout: layouts[i] };
        let [a, b, c, d] = [matrix(0, a), matrix(1, b), matrix(2, c), matrix(3, d)];
        let matmul = Matmul { operation, alpha, beta, a, b, c, d };
        driver.check_matmul(&matmul)?;
        driver.inject(Call::Launch, device)?;
        Ok(driver.submit(stream, Work::Matmul(Arc::new(matmul)))?)
    })
}

impl Driver {
    fn layout(&self, handle: u64) -> Result<Layout> {
        match self.blas.get(&handle) {
            Some(&Object::Layout(layout)) => Ok(layout),
            _ => Err(INVALID_VALUE),
        }
    }

    /// The product that handles stand for, if there is such a one.
    fn product(&self, desc: u64, layouts: [u64; 4]) -> Result<(Operation, [Layout; 4])> {
        let Some(&Object::Operation(operation)) = self.blas.get(&desc) else {
            return Err(INVALID_VALUE);
        };
        let [a, b, c, d] = layouts.map(|handle| self.layout(handle));
        let layouts = [a?, b?, c?, d?];
        let fits = check_layouts(&operation, layouts);
        if fits { Ok((operation, layouts)) } else { Err(NOT_SUPPORTED) }
    }
}
