//! Every architecture's logits are those recorded from Hugging Face transformers, through the whole
//! engine: on both backends, every instruction set and dtype, whatever block size and step budget.

use quire_engine::backend::Isa;
use quire_engine::{DType, EngineConfig};
use quire_model_zoo::verify::{Golden, VerifyReport, verify};
use quire_model_zoo::{BackendKind, LoadOptions, ModelFiles};
use quire_tests::fixtures::{every_path, golden_dirs};
use std::fs;
use std::path::Path;

const DTYPES: [DType; 2] = [DType::F32, DType::Bf16];

fn options(dtype: DType, block_size: usize, budget: usize) -> LoadOptions {
    let engine =
        EngineConfig { block_size, max_num_batched_tokens: Some(budget), ..Default::default() };
    LoadOptions { dtype: Some(dtype), engine, ..Default::default() }
}

fn report(dir: &Path, golden: &Path, options: &LoadOptions) -> VerifyReport {
    let files = ModelFiles::open(dir).expect("a golden model");
    let golden = Golden::open(golden, files.spec.vocab_size).expect("a golden file");
    let mut engine = files.load(options, &mut |_| ()).expect("a small model");
    let report = verify(&mut engine, &golden).expect("sequences that fit");
    engine.check_integrity();
    assert_eq!(report.sequences.len(), golden.len());
    report
}

fn assert_passes(dir: &Path, options: &LoadOptions) {
    let report = report(dir, &dir.join("golden.safetensors"), options);
    assert!(report.passed, "{} with {options:?}: {report:#?}", dir.display());
}

#[test]
fn the_cpu_at_every_block_size_and_budget() {
    for dir in golden_dirs() {
        for dtype in DTYPES {
            for block_size in [8, 16, 64, 256] {
                for budget in [3, 16, 2048] {
                    assert_passes(&dir, &options(dtype, block_size, budget));
                }
            }
        }
    }
}

#[test]
fn the_cpu_on_every_instruction_set() {
    for dir in golden_dirs() {
        for (isa, dtype) in every_path() {
            assert_passes(&dir, &LoadOptions { isa: Some(isa), ..options(dtype, 16, 100) });
        }
    }
}

/// Block size and budget go round together: the reference is slow.
#[test]
fn the_reference() {
    for dir in golden_dirs() {
        for (dtype, sizes) in DTYPES.into_iter().zip([[(8, 3), (64, 2048)], [(16, 16), (8, 2048)]])
        {
            for (block_size, budget) in sizes {
                let backend = BackendKind::Reference;
                assert_passes(&dir, &LoadOptions { backend, ..options(dtype, block_size, budget) });
            }
        }
    }
}

/// A comparison that could not fail would prove nothing above.
#[test]
fn one_logit_off_by_a_hundredth_fails() {
    let dir = &golden_dirs()[0];
    let mut bytes = fs::read(dir.join("golden.safetensors")).expect("a golden file");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let tensors: serde_json::Value =
        serde_json::from_slice(&bytes[8..8 + header]).expect("a JSON header");
    let start = tensors["logits_2"]["data_offsets"][0].as_u64().expect("an offset") as usize;
    // The 1000th logit of the third sequence.
    let at = 8 + header + start + 4000;
    let logit = f32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    bytes[at..at + 4].copy_from_slice(&(logit + 0.01).to_le_bytes());
    let folder = tempfile::tempdir().expect("a scratch folder");
    let changed = folder.path().join("golden.safetensors");
    fs::write(&changed, bytes).expect("space in the scratch folder");
    for isa in Isa::available() {
        let options = LoadOptions { isa: Some(isa), ..options(DType::F32, 16, 512) };
        let report = report(dir, &changed, &options);
        let passed: Vec<bool> = report.sequences.iter().map(|s| s.passed).collect();
        assert_eq!(passed, [true, true, false, true, true], "{isa}");
        assert!(!report.passed);
    }
}
