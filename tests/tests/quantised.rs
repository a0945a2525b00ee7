//! Quantised weights through the whole engine: how far they are from the same weights unpacked.
//! That they keep the numerics contract is seen in `invariance.rs` and `smollm2.rs`.

use quire_engine::backend::{CpuBackend, Quantization};
use quire_engine::ops::{Backend, MatrixLayout};
use quire_engine::{DType, Request, RequestOutput};
use quire_model_zoo::source::SourceDtype;
use quire_tests::fixtures::{QUANTISED, Setup, TinyModel};
use quire_tests::oracle::{greedy, run_all};
use quire_tests::strategies::mixed_requests;

/// Root mean square of the differences of logits over that of the logits, and how many.
fn difference(got: &[RequestOutput], want: &[RequestOutput]) -> (f64, usize) {
    let (mut error, mut size, mut count) = (0.0, 0.0, 0);
    for (got, want) in got.iter().zip(want) {
        // After another token was chosen there is nothing to compare.
        let same = got.token_ids.iter().zip(&want.token_ids).take_while(|(a, b)| a == b).count();
        let comparable = (got.prompt_token_ids.len() + same).min(want.logits.len());
        for (got, want) in got.logits.iter().zip(&want.logits).take(comparable) {
            for (&got, &want) in got.iter().zip(want) {
                error += f64::from(got - want).powi(2);
                size += f64::from(want).powi(2);
                count += 1;
            }
        }
    }
    ((error / size).sqrt(), count)
}

fn requests() -> Vec<Request> {
    let requests = mixed_requests(6, 3).into_iter();
    requests.map(|r| Request { params: greedy(8), capture_logits: true, ..r }).collect()
}

/// Models whose queries, keys and values are not all stored alike.
fn mixed_models() -> [(&'static str, TinyModel); 2] {
    let model = TinyModel::quantised(5, SourceDtype::Q4K);
    let two = model.clone().in_blocks(6, "v_proj.weight", SourceDtype::Q6K);
    [("Q4_K and Q6_K", two), ("Q4_K and F32", model.unpacked("k_proj.weight"))]
}

/// A block's activations are rounded to 1/127 of its largest, which is an error of 1/440 of that:
/// of normal values, of which 32 reach 2.1 deviations and 256 reach 2.9, 0.5 or 0.7 % of a block.
/// Those of the products of two layers and the head add up by squares, to some 1.5 to 2.5 %, as
/// measured. `Int8` rounds weights, too.
#[test]
fn logits_are_near_those_of_the_weights_unpacked() {
    let models = QUANTISED.map(|format| (format.name(), TinyModel::quantised(5, format)));
    for (format, quantised) in models.into_iter().chain(mixed_models()) {
        let mut unpacked = quantised.clone();
        unpacked.quantization = Quantization::None;
        for dtype in [DType::F32, DType::Bf16] {
            let want = run_all(&mut unpacked.engine(&Setup::cpu(DType::F32)), &requests());
            let got = run_all(&mut quantised.engine(&Setup::cpu(dtype)), &requests());
            let (relative, count) = difference(&got, &want);
            println!("{format} in {dtype}: {relative:.2e} over {count} logits");
            assert!(count > 10_000, "{count} logits could be compared");
            assert!(relative < 0.04, "{format} in {dtype}: {relative:e}");
            assert!(relative > 1e-3, "{format} in {dtype} was not quantised: {relative:e}");
        }
    }
}

/// A model says what it runs on, matrix by matrix: two layers of four, embedding and head.
#[test]
fn backends_say_what_is_quantised() {
    for (format, want) in QUANTISED.into_iter().zip([
        "Q8_0 as stored (10 of 10 matrices)",
        "Q4_0 as stored (10 of 10 matrices)",
        "Q4_1 as stored (10 of 10 matrices)",
        "Q4_K as stored (10 of 10 matrices)",
        "Q6_K as stored (10 of 10 matrices)",
        "int8 (10 of 10 matrices)",
    ]) {
        let mut model = TinyModel::quantised(5, format);
        let quantization = |model: &TinyModel| {
            model.engine(&Setup::cpu(DType::Bf16)).backend().quantization.to_string()
        };
        assert_eq!(quantization(&model), want);
        model.quantization = Quantization::None;
        assert_eq!(quantization(&model), "none");
    }
    for ((_, model), want) in mixed_models().into_iter().zip([
        "10 Q4_K as stored, 2 Q6_K as stored of 12 matrices",
        "Q4_K as stored (12 of 14 matrices)",
    ]) {
        let engine = model.engine(&Setup::cpu(DType::Bf16));
        assert_eq!(engine.backend().quantization.to_string(), want);
    }
}

/// Rows that are not whole blocks cannot be, and plain rows have none: both are kept in the dtype.
#[test]
fn what_has_no_blocks_is_kept_in_the_dtype() {
    let backend = CpuBackend::new(DType::Bf16, None, Some(1)).unwrap();
    let mut backend = backend.quantised(Quantization::Stored);
    let row = |_: usize, out: &mut [f32]| {
        out.fill(0.5);
        Ok(())
    };
    let matrix = backend.matrix(MatrixLayout::Plain, 64, 96, &row).unwrap();
    assert_eq!(matrix.bytes(), 64 * 96 * 2);
    assert!(!backend.info().quantization.is_quantised());
}
