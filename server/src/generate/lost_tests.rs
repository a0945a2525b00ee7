//! What becomes of a run whose device is lost under way.

use super::batch::{Batch, BatchOptions};
use super::progress::Progress;
use super::source::Source;
use super::stream::stream;
use crate::cli::Format;
use crate::output::Output;
use quire_engine::model::ModelInfo;
use quire_engine::ops::{BackendError, BackendInfo, BlockTransfers, KvLayout, WeightFormats};
use quire_engine::runner::{Executor, ExecutorOutput, Step};
use quire_engine::sampling::{RowTarget, SampleOutput};
use quire_engine::{DType, Engine, EngineConfig, Request, RequestError, SamplingParams};
use quire_model_zoo::{LoadOptions, ModelFiles};
use serde_json::Value;
use std::fs::{File, read_to_string};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/goldens/llama-gqa");
/// What it chooses.
const TOKEN: u32 = 5;

/// Chooses the same token always, until its steps are used up.
struct Dying {
    model: ModelInfo,
    layout: KvLayout,
    steps_left: usize,
    /// Whether what comes then is final.
    lost: bool,
    num_samples: usize,
}

impl Executor for Dying {
    fn model(&self) -> &ModelInfo {
        &self.model
    }

    fn backend(&self) -> BackendInfo {
        BackendInfo {
            name: "dying",
            isa: String::new(),
            threads: 1,
            dtype: DType::F32,
            quantization: WeightFormats::default(),
            batch_invariant: true,
        }
    }

    fn kv_layout(&self) -> &KvLayout {
        &self.layout
    }

    fn num_swap_blocks(&self) -> usize {
        0
    }

    fn runs_ahead(&self) -> bool {
        false
    }

    fn transfer(&mut self, _: &BlockTransfers) -> Result<(), BackendError> {
        Ok(())
    }

    fn submit(&mut self, step: Step<'_>) -> Result<(), BackendError> {
        if self.steps_left == 0 {
            return Err(BackendError::Device { source: "it fell off".into(), lost: self.lost });
        }
        self.steps_left -= 1;
        let rows = step.sampling.rows.iter();
        self.num_samples = rows.filter(|row| row.target != RowTarget::Nothing).count();
        Ok(())
    }

    fn collect(&mut self, out: &mut ExecutorOutput) -> Result<(), BackendError> {
        let sample = || SampleOutput { token: Ok(TOKEN), logprobs: None };
        out.samples.extend(std::iter::repeat_with(sample).take(self.num_samples));
        Ok(())
    }

    fn abandon(&mut self) {}

    fn synchronize(&mut self) -> Result<(), BackendError> {
        Ok(())
    }
}

/// An engine whose device works for `steps_left` steps.
fn engine(steps_left: usize, lost: bool) -> Engine {
    let files = ModelFiles::open(MODEL.as_ref()).unwrap();
    let engine = EngineConfig {
        max_num_seqs: 2,
        max_num_batched_tokens: Some(64),
        num_blocks: Some(32),
        ..Default::default()
    };
    let options = LoadOptions { engine, ..Default::default() };
    let config = files.plan(&options).unwrap();
    let sizes = &config.scheduler;
    let layout = files.info().kv_layout(sizes.num_blocks, sizes.block_size, DType::F32);
    let executor = Dying { model: files.info(), layout, steps_left, lost, num_samples: 0 };
    Engine::new(Box::new(executor), files.text.clone(), config, 0)
}

/// Requests for so many tokens each.
fn requests(lengths: &[usize]) -> Vec<Request> {
    let request = |&length: &usize| {
        let params = SamplingParams {
            max_tokens: Some(length),
            ignore_eos: true,
            temperature: 0.0,
            ..Default::default()
        };
        Request::new("x", params)
    };
    lengths.iter().map(request).collect()
}

#[test]
fn a_batch_keeps_what_is_finished_and_leaves_the_rest_to_a_run_that_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.jsonl");
    let output = || (Output::file(&path, File::create(&path).unwrap(), 0).unwrap(), Format::Jsonl);
    // More than an engine is given at a time.
    let source = || Source::prompts(requests(&[[1].as_slice(), &[9; 30]].concat()));
    let options = BatchOptions { resumable: true, ..Default::default() };
    let name = "prompt".to_owned();

    let mut lost = engine(3, true);
    let batch =
        Batch::new(&mut lost, source(), name.clone(), output(), Progress::hidden(), options);
    let tally = batch.run().unwrap();
    assert!(tally.lost && tally.any_failed());
    assert_eq!((tally.finished, tally.failed), (1, 0));
    assert!((1..30).contains(&tally.aborted), "{}", tally.aborted);
    assert_eq!(lost.num_unfinished(), 0);
    let refused = lost.add_request(requests(&[1]).remove(0)).unwrap_err();
    assert!(matches!(refused, RequestError::Lost(_)), "{refused}");
    let text = read_to_string(&path).unwrap();
    let results: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(results[0]["token_ids"], serde_json::json!([TOKEN]));
    assert_eq!(results.len(), 1);

    let mut failing = engine(3, false);
    let batch = Batch::new(&mut failing, source(), name, output(), Progress::hidden(), options);
    let error = batch.run().map(|tally| tally.finished).unwrap_err();
    assert_eq!(error.to_string(), "the engine failed");
    assert_eq!(read_to_string(&path).unwrap().lines().count(), 1);
}

#[test]
fn prompts_show_what_they_have() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out");
    let output = || Output::file(&path, File::create(&path).unwrap(), 0).unwrap();
    let mut lost = engine(3, true);
    let tally = stream(&mut lost, requests(&[2, 9, 9]), output()).unwrap();
    assert!(tally.lost);
    assert_eq!((tally.finished, tally.failed, tally.aborted), (1, 2, 0));
    let text = read_to_string(&path).unwrap();
    assert!(text.starts_with("==> prompt 1 <==\n"), "{text}");
    assert!(text.contains("==> prompt 2 <==\n"), "{text}");
    let error = stream(&mut engine(3, false), requests(&[9]), output()).map(|_| ()).unwrap_err();
    assert_eq!(error.to_string(), "the engine failed");
}
