//! A request run alone, and what two runs of it must agree on.

use crate::fixtures::{Setup, TinyModel};
use quire_engine::scheduler::SchedulerStats;
use quire_engine::{Engine, EngineConfig, Request, RequestOutput, SamplingParams};

/// Everything of an output that the numerics contract covers: all but its number and its clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// The output ids.
    pub token_ids: Vec<u32>,
    /// The output text.
    pub text: String,
    /// Why it ended, and what stopped it.
    pub end: String,
    /// (id, bits of the log-probability) of the sampled token and the best ones, by position.
    pub logprobs: Vec<Vec<(u32, u32)>>,
    /// Bits of the captured logits, by position.
    pub logits: Vec<Vec<u32>>,
    /// Bits of the sum and the score of a sequence found by beam search.
    pub beam: Option<(u64, u64)>,
}

impl From<&RequestOutput> for Fingerprint {
    fn from(output: &RequestOutput) -> Self {
        let logprobs = output.prompt_logprobs.iter().chain(&output.logprobs).flatten().map(|at| {
            let all = std::iter::once(&at.sampled).chain(&at.top);
            all.map(|l| (l.token, l.logprob.to_bits())).collect()
        });
        let bits = |row: &Vec<f32>| row.iter().map(|x| x.to_bits()).collect();
        Fingerprint {
            token_ids: output.token_ids.clone(),
            text: output.text.clone(),
            end: format!("{:?} {:?}", output.finish_reason, output.stop_reason),
            logprobs: logprobs.collect(),
            logits: output.logits.iter().map(bits).collect(),
            beam: output.beam.map(|b| (b.cumulative_logprob.to_bits(), b.score.to_bits())),
        }
    }
}

/// Greedy for exactly `max_tokens` tokens.
pub fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams {
        max_tokens: Some(max_tokens),
        temperature: 0.0,
        ignore_eos: true,
        ..Default::default()
    }
}

/// Steps `engine` until nothing is left, checking its invariants after every step, and returns
/// the outputs in the order of their requests and samples.
pub fn drain(engine: &mut Engine) -> Vec<RequestOutput> {
    let mut outputs = Vec::new();
    while engine.num_unfinished() > 0 {
        outputs.extend(engine.step().expect("the backend works").finished);
        engine.check_integrity();
    }
    outputs.sort_by_key(|output| (output.request_id, output.index));
    outputs
}

/// Runs `requests` together; for each the outputs of its `n` samples.
pub fn run_groups(engine: &mut Engine, requests: &[Request]) -> Vec<Vec<RequestOutput>> {
    for request in requests {
        engine.add_request(request.clone()).expect("a valid request");
    }
    let mut outputs = drain(engine).into_iter();
    let groups = requests.iter().map(|request| {
        let group: Vec<RequestOutput> = outputs.by_ref().take(request.params.n).collect();
        assert!(group.iter().map(|o| o.index).eq(0..request.params.n), "every sample ends once");
        assert!(group.iter().all(|o| o.request_id == group[0].request_id));
        group
    });
    let groups = groups.collect();
    assert_eq!(outputs.next(), None, "no output comes twice");
    groups
}

/// Runs `requests` of one sample each together; the outputs are in the same order.
pub fn run_all(engine: &mut Engine, requests: &[Request]) -> Vec<RequestOutput> {
    for request in requests {
        engine.add_request(request.clone()).expect("a valid request");
    }
    let outputs = drain(engine);
    assert_eq!(outputs.len(), requests.len(), "every request ends once");
    outputs
}

/// What a request gives on a fresh engine with nothing beside it: its prompt in one piece, all
/// blocks it could want, on the backend of `setup`.
pub fn run_alone(model: &TinyModel, setup: &Setup, request: &Request) -> RequestOutput {
    let config = EngineConfig { max_num_seqs: 1, ..roomy(model, setup) };
    let mut engine = model.engine(&setup.with(config));
    run_all(&mut engine, std::slice::from_ref(request)).remove(0)
}

/// Room for anything, and prompts in one piece.
fn roomy(model: &TinyModel, setup: &Setup) -> EngineConfig {
    EngineConfig {
        max_num_batched_tokens: Some(model.spec.max_position_embeddings),
        prefix_caching: setup.engine.prefix_caching,
        seed: setup.engine.seed,
        ..Default::default()
    }
}

/// What the samples of a request give as requests of their own, each run alone without a prefix
/// cache. A drawn request must have a seed.
pub fn samples_alone(model: &TinyModel, setup: &Setup, request: &Request) -> Vec<Fingerprint> {
    let params = &request.params;
    assert!(params.seed.is_some() || params.is_greedy(), "the seed is not the request's own");
    let setup = setup.with(EngineConfig { prefix_caching: false, ..setup.engine.clone() });
    if params.use_beam_search {
        let engine = &mut model.engine(&setup.with(roomy(model, &setup)));
        return run_groups(engine, std::slice::from_ref(request))[0]
            .iter()
            .map(Into::into)
            .collect();
    }
    let sample = |i| {
        let seed = params.seed.map(|seed| seed.wrapping_add(i));
        let params = SamplingParams { n: 1, seed, ..params.clone() };
        let output = run_alone(model, &setup, &Request { params, ..request.clone() });
        Fingerprint::from(&output)
    };
    (0..params.n as u64).map(sample).collect()
}

/// Asserts that a request has the bits of `alone` although more urgent ones take all seats after so
/// many steps. The policy of `setup` must be one of priorities.
pub fn preempt_after(
    model: &TinyModel,
    setup: &Setup,
    victim: &Request,
    alone: &[Fingerprint],
    steps: usize,
) -> SchedulerStats {
    let mut engine = model.engine(setup);
    let params = SamplingParams { priority: 1, ..victim.params.clone() };
    let id = engine.add_request(Request { params, ..victim.clone() }).expect("a valid request");
    let mut outputs = Vec::new();
    for _ in 0..steps {
        outputs.extend(engine.step().expect("the backend works").finished);
    }
    // As many at once as there are seats, so that the whole victim has to go.
    for i in 0..setup.engine.max_num_seqs as u32 {
        engine.add_request(Request::new(vec![i + 1; 9], greedy(2))).expect("a valid request");
    }
    outputs.extend(drain(&mut engine));
    outputs.retain(|output| output.request_id == id);
    outputs.sort_by_key(|output| output.index);
    let got: Vec<Fingerprint> = outputs.iter().map(Fingerprint::from).collect();
    assert_eq!(got, alone, "preempted after {steps} steps: {victim:?}, {:?}", setup.engine);
    assert_eq!(engine.num_held_blocks(), 0);
    engine.stats().scheduler
}
