//! Beam searches find the sequences, with the scores, that Hugging Face transformers found.

use quire_engine::sampling::{
    BeamParams, BeamSearch, BeamStep, EarlyStopping, Hypothesis, NumLogprobs, TokenLogprob,
};
use quire_engine::{DType, Engine, EngineConfig, Request, SamplingParams};
use quire_model_zoo::{BackendKind, LoadOptions, ModelFiles};
use quire_tests::fixtures::data_dir;
use quire_tests::oracle::{greedy, run_all};
use serde_json::Value;
use std::fs;

/// Most that a score may differ: sums of f32 in another order.
const SCORE_ERROR: f64 = 1e-4;

/// A recorded search.
struct Case {
    prompt: Vec<u32>,
    params: BeamParams,
    n: usize,
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
            prompt: ids(&case["prompt"]),
            params: BeamParams {
                width: number("width"),
                length_penalty: case["length_penalty"].as_f64().expect("a number") as f32,
                early_stopping,
                max_tokens: number("max_tokens"),
                stop_token_ids: ids(&case["stop_token_ids"]),
            },
            n: number("n"),
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
    let sizes = EngineConfig { max_logprobs: 64, ..Default::default() };
    let options =
        LoadOptions { backend, dtype: Some(DType::F32), engine: sizes, ..Default::default() };
    files.load(&options, &mut |_| ()).expect("a small model")
}

/// The `n` best tokens after each of `prompts`, with their log-probabilities.
fn best(engine: &mut Engine, prompts: &[Vec<u32>], n: usize) -> Vec<Vec<TokenLogprob>> {
    let logprobs = Some(NumLogprobs::Top(n as u32));
    let params = SamplingParams { logprobs, ..greedy(1) };
    let requests: Vec<Request> =
        prompts.iter().map(|prompt| Request::new(prompt.clone(), params.clone())).collect();
    let outputs = run_all(engine, &requests);
    outputs.into_iter().map(|output| output.logprobs.expect("asked for")[0].top.clone()).collect()
}

/// Every step of every beam is a request.
fn search(engine: &mut Engine, case: &Case) -> Vec<Hypothesis> {
    let mut search = BeamSearch::new(case.params.clone());
    let mut beams = vec![case.prompt.clone()];
    loop {
        let candidates = best(engine, &beams, search.candidates_per_beam());
        match search.advance(&candidates).expect("numbers") {
            BeamStep::Done => return search.into_hypotheses(case.n),
            BeamStep::Continue(next) => {
                beams = next.iter().map(|e| [&beams[e.parent][..], &[e.token]].concat()).collect();
            }
        }
    }
}

#[test]
fn searches_are_those_of_transformers() {
    for backend in [BackendKind::Cpu, BackendKind::Reference] {
        let mut searches = 0;
        for (model, cases) in recorded() {
            let mut engine = engine(&model, backend);
            for case in &cases {
                let found = search(&mut engine, case);
                let name = format!("{model} {:?} {:?} {backend:?}", case.prompt, case.params);
                let stops = &case.params.stop_token_ids;
                let sequences: Vec<&Vec<u32>> = found.iter().map(|h| &h.token_ids).collect();
                assert_eq!(sequences, case.token_ids.iter().collect::<Vec<_>>(), "{name}");
                for (i, h) in found.iter().enumerate() {
                    let last = h.token_ids.last().filter(|id| stops.contains(id));
                    assert_eq!(h.stop.as_ref(), last, "{name}");
                    let Some(scores) = &case.scores else { continue };
                    let error = (h.score - scores[i]).abs();
                    assert!(error < SCORE_ERROR, "{name}: {} for {}", h.score, scores[i]);
                }
                searches += 1;
            }
        }
        assert_eq!(searches, 44);
    }
}
