//! Random mixes of requests of every kind under random settings of the scheduler, with arrivals,
//! aborts and failed steps: each request's answer must be the one that it has alone.

use crate::failing::{Failing, Fault};
use crate::fixtures::{Setup, TinyModel};
use crate::oracle::{Fingerprint, greedy, samples_alone};
use crate::rng::Rng;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use quire_engine::config::PreemptionMode;
use quire_engine::sampling::NumLogprobs;
use quire_engine::scheduler::{Policy, PreemptionCosts, SchedulerStats};
use quire_engine::{
    Engine, EngineConfig, FinishReason, Request, RequestError, RequestId, RequestOutput,
    SamplingParams,
};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Tokens of prompt and output that no request of a [`Catalogue`] exceeds.
pub const LONGEST: usize = 96;
/// Requests of a whole [`Catalogue`]: every kind three times.
pub const NUM_REQUESTS: usize = 48;
/// Steps that no mix needs.
const TOO_MANY_STEPS: usize = 20_000;

/// Requests whose prompts share beginnings, with what each gives alone.
pub struct Catalogue {
    model: TinyModel,
    requests: Vec<Request>,
    alone: Vec<Vec<Fingerprint>>,
}

impl Catalogue {
    /// The first `num_requests`; 16 are every kind once.
    pub fn new(model: TinyModel, setup: &Setup, num_requests: usize) -> Self {
        let requests: Vec<Request> = (0..num_requests).map(request).collect();
        let alone = requests.iter().map(|r| samples_alone(&model, setup, r)).collect();
        Catalogue { model, requests, alone }
    }
}

/// Strings of a request.
pub fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&w| w.to_owned()).collect()
}

fn beams(n: usize, width: usize, max_tokens: usize) -> SamplingParams {
    SamplingParams { n, use_beam_search: true, beam_width: Some(width), ..greedy(max_tokens) }
}

/// A request of the catalogue.
fn request(i: usize) -> Request {
    let rng = &mut Rng::named(17, &format!("request {i}"));
    // Three texts, cut at and around the ends of blocks, some with an end of their own.
    let text = |t: usize| (0..72u32).map(move |p| (p * p + 5 * p + 31 * t as u32) % 256);
    let len = [1, 7, 16, 31, 32, 33, 48, 63, 64, 65, 72][rng.below(11)];
    let mut prompt: Vec<u32> = text(rng.below(3)).take(len).collect();
    prompt.extend((0..rng.below(3) * 4).map(|_| rng.below(256) as u32));
    let max_tokens = 1 + rng.below((LONGEST - prompt.len()).min(24));
    let top = Some(NumLogprobs::Top(2));
    let base = SamplingParams {
        seed: Some(rng.next_u64()),
        temperature: 0.9,
        priority: rng.below(4) as i32 - 2,
        logprobs: i.is_multiple_of(2).then_some(NumLogprobs::Top(2)),
        ..greedy(max_tokens)
    };
    let plain = greedy(max_tokens);
    let params = match i % 16 {
        0 => plain,
        1 => SamplingParams { n: 2, ..base },
        2 => SamplingParams { n: 4, ..base },
        3 => SamplingParams { n: 3, presence_penalty: 1.5, repetition_penalty: 1.2, ..base },
        4 => SamplingParams { bad_words: words(&["e", "ab"]), frequency_penalty: -0.5, ..base },
        5 => SamplingParams { n: 2, stop: words(&["e", "q", "\u{FFFD}"]), min_tokens: 1, ..base },
        6 => SamplingParams { n: 3, stop_token_ids: (0..40).collect(), ..base },
        7 => {
            SamplingParams { min_tokens: max_tokens / 2, stop_token_ids: (0..90).collect(), ..base }
        }
        8 => SamplingParams { n: 2, prompt_logprobs: top, ..base },
        9 => SamplingParams { prompt_logprobs: top, ..plain },
        10 => SamplingParams { cache_salt: Some(format!("salt {}", i % 3)), ..base },
        11 => beams(1, 1 + i % 4, max_tokens),
        12 => SamplingParams { stop_token_ids: (0..60).collect(), ..beams(2, 3, max_tokens) },
        13 => SamplingParams { length_penalty: 0.5, ..beams(4, 4, max_tokens) },
        14 => SamplingParams { allowed_token_ids: Some((97..123).collect()), top_k: 9, ..base },
        _ => base,
    };
    let streamable = !params.use_beam_search;
    Request {
        stream: streamable && i.is_multiple_of(3),
        capture_logits: streamable && i % 16 == 15,
        ..Request::new(prompt, params)
    }
}

/// A request of a mix.
#[derive(Clone, Debug)]
struct Arrival {
    /// Which of the catalogue.
    request: usize,
    /// Steps after the one before.
    gap: usize,
    /// Aborted so many steps after it came.
    abort: Option<usize>,
}

/// Of every `period` steps the first fails, and `again` more. Not for ever: what a failed step
/// takes back may be more than the steps between two of them compute.
#[derive(Clone, Debug)]
struct Faults {
    kind: Fault,
    period: usize,
    again: usize,
}

#[derive(Clone, Debug)]
struct Mix {
    engine: EngineConfig,
    arrivals: Vec<Arrival>,
    faults: Option<Faults>,
}

/// A way to run an engine. Host space and costs are given in blocks.
fn engine_config() -> impl Strategy<Value = EngineConfig> {
    let sizes = (
        select(vec![8usize, 16, 32, 64]),
        prop_oneof![1..5usize, 5..20usize],
        prop_oneof![1..9usize, 9..70usize, Just(400usize)],
        prop_oneof![0..4usize, 4..20usize],
    );
    let swap = select(vec![0usize, 2, 7, 500]);
    let preemption = select(vec![
        PreemptionMode::Recompute,
        PreemptionMode::Swap,
        PreemptionMode::Costs(PreemptionCosts {
            recompute_ns_per_token: 10,
            swap_ns_per_block: 40,
        }),
    ]);
    let policy = prop_oneof![
        4 => Just(Policy::Fcfs),
        4 => (1..30u32).prop_map(|aging_steps| Policy::Priority { aging_steps }),
        1 => Just(Policy::Static),
    ];
    (sizes, swap, preemption, policy, prop::bool::weighted(0.7), any::<bool>()).prop_map(
        |((block_size, seqs, budget, more), swap, preemption, policy, prefix_caching, ahead)| {
            EngineConfig {
                max_num_seqs: seqs,
                max_num_batched_tokens: Some(budget),
                max_model_len: Some(LONGEST),
                block_size,
                num_blocks: Some(LONGEST.div_ceil(block_size) + more),
                swap_bytes: swap * block_bytes(block_size),
                prefix_caching,
                policy,
                preemption,
                async_scheduling: Some(ahead),
                ..Default::default()
            }
        },
    )
}

/// Bytes of a block, at least those of any dtype: K and V of 2 layers with 2 heads of 16 in f32.
fn block_bytes(block_size: usize) -> usize {
    2 * 2 * 2 * 16 * 4 * block_size
}

fn mix(num_requests: usize) -> impl Strategy<Value = Mix> {
    let abort = prop::option::weighted(0.15, 0..30usize);
    let arrival = (0..num_requests, select(vec![0usize, 0, 0, 1, 3, 12]), abort)
        .prop_map(|(request, gap, abort)| Arrival { request, gap, abort });
    let kind = select(vec![Fault::Before, Fault::After, Fault::Transfer]);
    let faults = (kind, 4..12usize, 0..3usize).prop_map(|(kind, period, again)| Faults {
        kind,
        period,
        again,
    });
    let arrivals = prop::collection::vec(arrival, 1..14);
    (engine_config(), arrivals, prop::option::weighted(0.3, faults))
        .prop_map(|(engine, arrivals, faults)| Mix { engine, arrivals, faults })
}

/// What came of one request of a mix.
#[derive(Default)]
struct Answer {
    outputs: Vec<RequestOutput>,
    /// Text streamed, by sample.
    streamed: BTreeMap<usize, String>,
}

/// Runs a mix; for each arrival its answer, `None` where the engine refused its beams.
fn run_mix(engine: &mut Engine, catalogue: &Catalogue, mix: &Mix) -> Vec<Option<Answer>> {
    let mut answers: Vec<Option<Answer>> = Vec::new();
    let mut places: BTreeMap<RequestId, usize> = BTreeMap::new();
    let mut aborts: Vec<(usize, RequestId)> = Vec::new();
    let mut next_at = mix.arrivals.first().map_or(0, |a| a.gap);
    for step in 0.. {
        assert!(step < TOO_MANY_STEPS, "no end");
        while answers.len() < mix.arrivals.len() && next_at <= step {
            let arrival = &mix.arrivals[answers.len()];
            next_at += mix.arrivals.get(answers.len() + 1).map_or(0, |a| a.gap);
            match engine.add_request(catalogue.requests[arrival.request].clone()) {
                Ok(id) => {
                    places.insert(id, answers.len());
                    aborts.extend(arrival.abort.map(|after| (step + after, id)));
                    answers.push(Some(Answer::default()));
                }
                Err(RequestError::Admission(error)) => {
                    assert!(error.to_string().contains("beam"), "{error}");
                    answers.push(None);
                }
                Err(error) => panic!("{error}"),
            }
        }
        let mut outputs = Vec::new();
        for &(at, id) in &aborts {
            if at == step {
                outputs.extend(engine.abort(id));
                engine.check_integrity();
            }
        }
        if answers.len() == mix.arrivals.len() && engine.num_unfinished() == 0 {
            collect(&mut answers, &places, outputs);
            return answers;
        }
        // A failed step is tried again.
        if let Ok(step) = engine.step() {
            outputs.extend(step.finished);
            for delta in step.deltas {
                let answer = answers[places[&delta.request_id]].as_mut().expect("accepted");
                answer.streamed.entry(delta.index).or_default().push_str(&delta.text);
            }
        }
        engine.check_integrity();
        collect(&mut answers, &places, outputs);
    }
    unreachable!("the loop returns");
}

fn collect(
    answers: &mut [Option<Answer>],
    places: &BTreeMap<RequestId, usize>,
    outputs: Vec<RequestOutput>,
) {
    for output in outputs {
        let answer = answers[places[&output.request_id]].as_mut().expect("accepted");
        answer.outputs.push(output);
    }
}

/// Asserts that an answer is the one alone, as far as it was not aborted.
fn check(answer: &Answer, request: &Request, alone: &[Fingerprint], aborted: bool) {
    let mut outputs: Vec<&RequestOutput> = answer.outputs.iter().collect();
    outputs.sort_by_key(|output| output.index);
    assert!(outputs.iter().map(|o| o.index).eq(0..request.params.n), "every sample ends once");
    for (output, alone) in outputs.into_iter().zip(alone) {
        if output.finish_reason == FinishReason::Abort {
            assert!(aborted, "nobody aborted it");
            assert!(alone.token_ids.starts_with(&output.token_ids), "{request:?}");
            continue;
        }
        assert_eq!(&Fingerprint::from(output), alone, "sample {} of {request:?}", output.index);
        if request.stream {
            let streamed = answer.streamed.get(&output.index);
            assert_eq!(streamed, Some(&output.text), "streamed text of {request:?}");
        }
        assert!(output.metrics.num_cached_tokens < output.prompt_token_ids.len());
    }
}

/// Runs mixes until the first that goes wrong, which is made smaller; what all of them did.
pub fn run_mixes(
    catalogue: &Catalogue,
    setup: &Setup,
    seed: u8,
    cases: u32,
) -> Vec<SchedulerStats> {
    let config = ProptestConfig { cases, failure_persistence: None, ..Default::default() };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let stats = RefCell::new(Vec::new());
    let run = |mix: Mix| {
        let setup = setup.with(mix.engine.clone());
        let faults = mix.faults.clone();
        let fault = move |call: usize| {
            let faults = faults.as_ref()?;
            (call < 100 && call % faults.period <= faults.again).then_some(faults.kind)
        };
        let mut engine = catalogue
            .model
            .engine_with(&setup, catalogue.model.text(), |executor| Failing::wrap(executor, fault));
        let answers = run_mix(&mut engine, catalogue, &mix);
        for (arrival, answer) in mix.arrivals.iter().zip(&answers) {
            let Some(answer) = answer else { continue };
            let (request, alone) =
                (&catalogue.requests[arrival.request], &catalogue.alone[arrival.request]);
            check(answer, request, alone, arrival.abort.is_some());
        }
        stats.borrow_mut().push(engine.stats().scheduler);
        Ok(())
    };
    if let Err(error) =
        TestRunner::new_with_rng(config, rng).run(&mix(catalogue.requests.len()), run)
    {
        panic!("a mix went wrong: {error}");
    }
    stats.into_inner()
}

/// Asserts that every device of the scheduler was used.
///
/// # Panics
/// One was not.
pub fn assert_used(stats: &[SchedulerStats], windowed: bool) {
    let sum = |of: fn(&SchedulerStats) -> u64| stats.iter().map(of).sum::<u64>();
    for (what, count) in [
        ("hits", sum(|s| s.prefix_hits)),
        ("recomputations", sum(|s| s.num_preempted_recompute)),
        ("swaps", sum(|s| s.num_preempted_swap)),
        ("swaps without room", sum(|s| s.num_swap_fallbacks)),
        ("blocks swapped out", sum(|s| s.num_blocks_swapped_out)),
        ("blocks swapped in", sum(|s| s.num_blocks_swapped_in)),
        ("forks", sum(|s| s.num_forks)),
        ("copies", sum(|s| s.num_block_copies)),
        ("cancelled steps", sum(|s| s.num_cancelled_steps)),
        ("ends under way", sum(|s| s.num_ended_in_flight)),
        ("padding", sum(|s| s.num_padding_tokens)),
        ("window", if windowed { sum(|s| s.num_window_freed) } else { 1 }),
    ] {
        assert!(count > 0, "no {what}");
    }
    assert!(windowed || sum(|s| s.num_window_freed) == 0, "a full layer needs every block");
}
