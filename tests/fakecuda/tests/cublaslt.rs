//! Products of cuBLASLt, through cudarc's safe wrapper.

mod common;

use std::sync::Arc;

use common::multiply;
use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys::cublasStatus_t;
use cudarc::cublaslt::{Activation, CudaBlasLT, MatmulConfig};
use cudarc::driver::{CudaContext, CudaStream, sys};
use fakecuda::{Call, Config, FakeCuda};

const M: usize = 5;
const N: usize = 3;
const K: usize = 7;

/// Column-major, `stride` rows apart; what is between the columns is NaN.
fn matrix(rows: usize, cols: usize, stride: usize, at: impl Fn(usize, usize) -> f32) -> Vec<f32> {
    let element = |i: usize| match i % stride {
        row if row < rows => at(row, i / stride),
        _ => f32::NAN,
    };
    (0..stride * cols).map(element).collect()
}

fn a(i: usize, j: usize) -> f32 {
    (i * 3 + j * 5) as f32 - 20.0
}

fn b(i: usize, j: usize) -> f32 {
    (i * 7) as f32 - (j * 2) as f32
}

fn config(transa: bool, transb: bool) -> MatmulConfig {
    MatmulConfig {
        transa,
        transb,
        transc: false,
        m: M as u64,
        n: N as u64,
        k: K as u64,
        alpha: 1.0,
        lda: 10,
        ldb: 9,
        beta: 0.0,
        ldc: 8,
        stride_a: None,
        stride_b: None,
        stride_c: None,
        stride_bias: None,
        batch_size: None,
    }
}

fn setup() -> (FakeCuda, Arc<CudaContext>, Arc<CudaStream>) {
    let fake = FakeCuda::load(&Config::default());
    fake.load_cublaslt();
    let context = CudaContext::new(0).expect("a device");
    let stream = context.new_stream().expect("a stream");
    (fake, context, stream)
}

/// All values are integers that f32 holds, so that the order of a sum does not matter.
#[test]
fn products_are_what_they_should_be() {
    let (fake, context, stream) = setup();
    let blas = CudaBlasLT::new(stream.clone()).expect("the library");
    for (transa, transb) in [(false, false), (true, false), (false, true), (true, true)] {
        for (alpha, beta, has_bias) in [(1.0, 0.0, false), (1.0, 1.0, true), (2.0, -1.0, true)] {
            let left = match transa {
                true => matrix(K, M, 10, |i, j| a(j, i)),
                false => matrix(M, K, 10, a),
            };
            let right = match transb {
                true => matrix(N, K, 9, |i, j| b(j, i)),
                false => matrix(K, N, 9, b),
            };
            let bias: Vec<f32> = (0..M).map(|i| i as f32 * 100.0).collect();
            let before = matrix(M, N, 8, |i, j| (i + j) as f32);
            let config = MatmulConfig { alpha, beta, ..config(transa, transb) };
            let bias = has_bias.then_some(&bias[..]);
            let product = multiply(&blas, &stream, config, [&left, &right, &before], (bias, None));
            let product = product.expect("a product");
            for i in 0..M {
                for j in 0..N {
                    let sum: f32 = (0..K).map(|k| a(i, k) * b(k, j)).sum();
                    let bias = bias.map_or(0.0, |bias| bias[i]);
                    let want = alpha * sum + beta * (i + j) as f32 + bias;
                    assert_eq!(product[j * 8 + i], want, "{i}, {j} of {config:?}");
                }
            }
        }
    }
    assert_eq!(fake.stats().matmuls, 12);
    assert_eq!(fake.stats().live_blas, 1);
    drop(blas);
    assert_eq!(fake.stats().live_blas, 0);
    drop(context);
}

#[test]
fn products_are_captured() {
    let (fake, context, stream) = setup();
    // No events of cudarc's own in the capture.
    common::disable_event_tracking(&context);
    let blas = CudaBlasLT::new(stream.clone()).expect("the library");
    let graph = common::captured_product(&blas, &stream, config(false, false));
    assert_eq!(fake.stats().matmuls, 0);
    fake.log_launches(true);
    graph.launch().expect("a launch");
    stream.synchronize().expect("products of zeros");
    let launches = fake.take_launches();
    assert_eq!(launches.len(), 1);
    assert_eq!((launches[0].entry.as_str(), launches[0].in_graph), ("cublasLtMatmul", true));
    assert_eq!(launches[0].flops, 2 * (M * N * K) as u64);
}

#[test]
fn what_there_is_not_is_refused() {
    let (fake, _context, stream) = setup();
    let blas = CudaBlasLT::new(stream.clone()).expect("the library");
    let (left, right, out) = (vec![0.0; 70], vec![0.0; 63], vec![0.0; 24]);
    let run = |config: MatmulConfig, activation: Option<&Activation>| {
        let data = [&left[..], &right[..], &out[..]];
        multiply(&blas, &stream, config, data, (None, activation))
            .err()
            .map(|CublasError(status)| status)
    };
    let plain = config(false, false);
    assert_eq!(run(plain, None), None);
    let not_supported = Some(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED);
    assert_eq!(run(plain, Some(&Activation::Relu)), not_supported);
    assert_eq!(run(MatmulConfig { lda: 4, ..plain }, None), not_supported, "columns overlap");
    let batched = MatmulConfig { batch_size: Some(2), stride_a: Some(0), ..plain };
    assert_eq!(run(batched, None), not_supported);
    let invalid = Some(cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE);
    assert_eq!(run(MatmulConfig { lda: 100, ..plain }, None), invalid, "past the end");
    fake.fail(Call::Launch, 1, 700);
    let failed = Some(cublasStatus_t::CUBLAS_STATUS_EXECUTION_FAILED);
    assert_eq!(run(plain, None), failed);
    assert_eq!(
        stream.synchronize().err().map(|error| error.0),
        Some(sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
    );
    // cudarc's Drop of the library panics where the context is lost.
    std::mem::forget(blas);
}
