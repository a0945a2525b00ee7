//! Beam searches find the sequences, with the scores, that Hugging Face transformers found.

use quire_engine::engine::RequestError;
use quire_engine::sampling::EarlyStopping;
use quire_engine::scheduler::{AdmissionError, Policy};
use quire_engine::{
    DType, Engine, EngineConfig, FinishReason, Request, RequestOutput, SamplingParams, StopReason,
};
use quire_model_zoo::{BackendKind, LoadOptions, ModelFiles};
use quire_tests::fixtures::{Setup, TinyModel, data_dir};
use quire_tests::oracle::{Fingerprint, drain, greedy, run_groups, samples_alone};
use serde_json::Value;
use std::fs;

/// Most that a score may differ: sums of f32 in another order.
const SCORE_ERROR: f64 = 1e-4;

fn beams(n: usize, width: usize, max_tokens: usize) -> SamplingParams {
    SamplingParams { n, use_beam_search: true, beam_width: Some(width), ..greedy(max_tokens) }
}

/// A recorded search.
struct Case {
    request: Request,
    token_ids: Vec<Vec<u32>>,
    /// None of one beam.
    scores: Option<Vec<f64>>,
}

impl Case {
    fn read(case: &Value) -> Self {
        let number = |field: &str| case[field].as_u64().expect("a number") as usize;
        let early_stopping = match &case["early_stopping"] {
            Value::Bool(false) => EarlyStopping::Heuristic,
            Value::Bool(true) => EarlyStopping::Always,
            other => {
                assert_eq!(other, "never");
                EarlyStopping::Never
            }
        };
        let scores = case["scores"].as_array();
        Case {
            request: Request::new(
                ids(&case["prompt"]),
                SamplingParams {
                    length_penalty: case["length_penalty"].as_f64().expect("a number") as f32,
                    early_stopping,
                    stop_token_ids: ids(&case["stop_token_ids"]),
                    ..beams(number("n"), number("width"), number("max_tokens"))
                },
            ),
            token_ids: case["token_ids"].as_array().expect("a list").iter().map(ids).collect(),
            scores: scores.map(|all| all.iter().map(|x| x.as_f64().expect("a score")).collect()),
        }
    }
}

fn ids(list: &Value) -> Vec<u32> {
    let items = list.as_array().expect("a list").iter();
    items.map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// The searches of each file, by the model's name.
fn recorded() -> Vec<(String, Vec<Case>)> {
    let entries = fs::read_dir(data_dir().join("beam")).expect("recorded searches");
    let mut files: Vec<(String, Vec<Case>)> = entries
        .map(|entry| {
            let text = fs::read(entry.expect("readable").path()).expect("readable");
            let file: Value = serde_json::from_slice(&text).expect("JSON");
            let cases = file["cases"].as_array().expect("a list").iter().map(Case::read);
            (file["model"].as_str().expect("a name").to_owned(), cases.collect())
        })
        .collect();
    files.sort_by(|a, b| a.0.cmp(&b.0));
    files
}

fn engine(model: &str, backend: BackendKind) -> Engine {
    let files = ModelFiles::open(&data_dir().join("goldens").join(model)).expect("a golden model");
    let options = LoadOptions { backend, dtype: Some(DType::F32), ..Default::default() };
    files.load(&options, &mut |_| ()).expect("a small model")
}

/// Asserts that `found` is what was recorded.
fn assert_recorded(found: &[RequestOutput], case: &Case) {
    let request = &case.request;
    let sequences: Vec<&Vec<u32>> = found.iter().map(|output| &output.token_ids).collect();
    assert_eq!(sequences, case.token_ids.iter().collect::<Vec<_>>(), "{request:?}");
    for (i, output) in found.iter().enumerate() {
        let stops = &request.params.stop_token_ids;
        let last = output.token_ids.last().filter(|id| stops.contains(id));
        let (end, stop) = match last {
            Some(&id) => (FinishReason::Stop, Some(StopReason::Token(id))),
            None => (FinishReason::Length, None),
        };
        assert_eq!((&output.finish_reason, &output.stop_reason), (&end, &stop), "{request:?}");
        let beam = output.beam.expect("found by beam search");
        let length = output.token_ids.len() as f64;
        let penalty = f64::from(request.params.length_penalty);
        assert_eq!(beam.score, beam.cumulative_logprob / length.powf(penalty), "{request:?}");
        let Some(scores) = &case.scores else { continue };
        let error = (beam.score - scores[i]).abs();
        assert!(error < SCORE_ERROR, "{request:?}: {} for {}", beam.score, scores[i]);
    }
}

#[test]
fn searches_are_those_of_transformers() {
    for backend in [BackendKind::Cpu, BackendKind::Reference] {
        let mut searches = 0;
        for (model, cases) in recorded() {
            // One by one, then all together.
            let requests: Vec<Request> = cases.iter().map(|case| case.request.clone()).collect();
            let mut one = engine(&model, backend);
            for case in &cases {
                let found = run_groups(&mut one, std::slice::from_ref(&case.request)).remove(0);
                assert_recorded(&found, case);
                searches += 1;
            }
            let together = run_groups(&mut engine(&model, backend), &requests);
            together.iter().zip(&cases).for_each(|(found, case)| assert_recorded(found, case));
        }
        assert_eq!(searches, 44);
    }
}

fn tight(max_num_seqs: usize, num_blocks: usize) -> EngineConfig {
    EngineConfig {
        max_num_seqs,
        max_num_batched_tokens: Some(16),
        max_model_len: Some(64),
        block_size: 8,
        num_blocks: Some(num_blocks),
        ..Default::default()
    }
}

#[test]
fn searches_that_cannot_be_are_refused_and_the_greatest_that_can_are_not() {
    let model = TinyModel::new(1);
    let setup = &Setup::every()[0];
    let mut engine = model.engine(&setup.with(tight(4, 20)));
    let refused = |engine: &mut Engine, request: Request| {
        let error = engine.add_request(request).expect_err("a search that cannot be");
        engine.check_integrity();
        assert_eq!(engine.num_unfinished(), 0);
        error
    };
    let prompt = |len: u32| (0..len).collect::<Vec<u32>>();
    let admission = |error: RequestError| match error {
        RequestError::Admission(error) => error,
        other => panic!("{other}"),
    };
    let error = refused(&mut engine, Request::new(prompt(4), beams(1, 5, 4)));
    assert_eq!(
        admission(error),
        AdmissionError::BeamsTooWide { width: 5, limit: 4, name: "max_num_seqs" }
    );
    // 2 blocks of the prompt are shared, and each of 4 beams writes to 5 of its own.
    let error = admission(refused(&mut engine, Request::new(prompt(16), beams(1, 4, 33))));
    let needed = 2 + 4 * 5;
    let too_long =
        AdmissionError::BeamsTooLong { prompt: 16, width: 4, max_tokens: 33, needed, limit: 20 };
    assert_eq!(error, too_long);
    let error = admission(refused(&mut engine, Request::new(prompt(60), beams(1, 2, 5))));
    assert_eq!(error, AdmissionError::TooLong { prompt: 60, max_tokens: 5, limit: 64 });
    for request in [
        Request { stream: true, ..Request::new(prompt(4), beams(1, 2, 4)) },
        Request { capture_logits: true, ..Request::new(prompt(4), beams(1, 2, 4)) },
    ] {
        let error = refused(&mut engine, request);
        assert!(matches!(error, RequestError::BeamsAtTheEndOnly), "{error}");
    }
    let fixed = EngineConfig { policy: Policy::Static, ..tight(4, 20) };
    let mut fixed = model.engine(&setup.with(fixed));
    let error = refused(&mut fixed, Request::new(prompt(4), beams(1, 2, 4)));
    assert_eq!(admission(error), AdmissionError::StaticBeams);

    for request in [
        Request::new(prompt(16), beams(4, 4, 16)),
        Request::new(prompt(16), beams(2, 4, 1)),
        Request::new(prompt(60), beams(2, 4, 4)),
    ] {
        let got = run_groups(&mut engine, std::slice::from_ref(&request)).remove(0);
        let got: Vec<Fingerprint> = got.iter().map(Fingerprint::from).collect();
        assert_eq!(got, samples_alone(&model, setup, &request));
    }
}

#[test]
fn a_search_aborted_at_any_step_leaves_nothing_behind() {
    let model = TinyModel::new(1);
    let setup = &Setup::every()[0];
    let search = Request::new(vec![7; 20], beams(3, 4, 14));
    let mates = [Request::new(vec![9; 20], beams(2, 2, 10)), Request::new(vec![7; 21], greedy(12))];
    let alone: Vec<Vec<Fingerprint>> =
        mates.iter().map(|mate| samples_alone(&model, setup, mate)).collect();
    for ahead in [false, true] {
        for steps in 0..15 {
            let config = EngineConfig { async_scheduling: Some(ahead), ..tight(8, 24) };
            let mut engine = model.engine(&setup.with(config));
            let id = engine.add_request(search.clone()).expect("a valid request");
            for mate in &mates {
                engine.add_request(mate.clone()).expect("a valid request");
            }
            let mut outputs = Vec::new();
            for _ in 0..steps {
                outputs.extend(engine.step().expect("the backend works").finished);
            }
            let aborted = engine.abort(id);
            engine.check_integrity();
            assert_eq!(aborted.len(), 3);
            for output in &aborted {
                assert_eq!(output.finish_reason, FinishReason::Abort);
                assert_eq!(output.prompt_token_ids, [7; 20]);
                assert!(output.token_ids.is_empty() && output.beam.is_none());
            }
            outputs.extend(drain(&mut engine));
            outputs.sort_by_key(|output| (output.request_id, output.index));
            let got: Vec<Fingerprint> = outputs.iter().map(Fingerprint::from).collect();
            assert_eq!(got, alone.concat(), "aborted after {steps} steps");
            assert_eq!(engine.num_held_blocks(), 0);
        }
    }
}
