//! The scheduler's devices change no bit of a result: prefix cache, sharing among samples and
//! beams, chunks, preemption of either kind, priorities, static batches, steps planned ahead,
//! failed steps and aborts, alone and all together.

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
use quire_tests::failing::{Failing, Fault};
use quire_tests::fixtures::{Setup, TinyModel};
use quire_tests::oracle::{Fingerprint, drain, greedy, run_groups, samples_alone};
use quire_tests::rng::Rng;
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Tokens of prompt and output that no request of a [`Catalogue`] exceeds.
const LONGEST: usize = 96;
const NUM_REQUESTS: usize = 48;
/// Steps that no mix needs.
const TOO_MANY_STEPS: usize = 20_000;

/// Requests whose prompts share beginnings, with what each gives alone.
struct Catalogue {
    model: TinyModel,
    requests: Vec<Request>,
    alone: Vec<Vec<Fingerprint>>,
}

impl Catalogue {
    fn new(model: TinyModel, setup: &Setup) -> Self {
        let requests: Vec<Request> = (0..NUM_REQUESTS).map(request).collect();
        let alone = requests.iter().map(|r| samples_alone(&model, setup, r)).collect();
        Catalogue { model, requests, alone }
    }
}

fn words(words: &[&str]) -> Vec<String> {
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
                async_scheduling: ahead,
                ..Default::default()
            }
        },
    )
}

/// Bytes of a block, at least those of any dtype: K and V of 2 layers with 2 heads of 16 in f32.
fn block_bytes(block_size: usize) -> usize {
    2 * 2 * 2 * 16 * 4 * block_size
}

fn mix() -> impl Strategy<Value = Mix> {
    let abort = prop::option::weighted(0.15, 0..30usize);
    let arrival = (0..NUM_REQUESTS, select(vec![0usize, 0, 0, 1, 3, 12]), abort)
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
fn run_mixes(catalogue: &Catalogue, setup: &Setup, seed: u8, cases: u32) -> Vec<SchedulerStats> {
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
    if let Err(error) = TestRunner::new_with_rng(config, rng).run(&mix(), run) {
        panic!("a mix went wrong: {error}");
    }
    stats.into_inner()
}

fn cases(n: u32) -> u32 {
    n * std::env::var("QUIRE_TEST_EFFORT").map_or(1, |v| v.parse().expect("a number"))
}

/// How much of each device was used.
fn assert_used(stats: &[SchedulerStats], windowed: bool) {
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

#[test]
fn no_mix_of_everything_changes_a_bit() {
    let mut stats = Vec::new();
    for (setup, (seed, n)) in Setup::every().into_iter().zip([(1, 200), (2, 60), (3, 60)]) {
        let catalogue = Catalogue::new(TinyModel::new(1), &setup);
        stats.extend(run_mixes(&catalogue, &setup, seed, cases(n)));
    }
    assert_used(&stats, false);
}

#[test]
fn no_mix_with_windows_changes_a_bit() {
    let mut stats = Vec::new();
    for (setup, (seed, n)) in Setup::every().into_iter().zip([(4, 200), (5, 60), (6, 60)]) {
        let model = TinyModel::with_windows(1, [Some(12), Some(20)]);
        let catalogue = Catalogue::new(model, &setup);
        stats.extend(run_mixes(&catalogue, &setup, seed, cases(n)));
    }
    assert_used(&stats, true);
}

fn engine(model: &TinyModel, setup: &Setup, config: EngineConfig) -> Engine {
    model.engine(&setup.with(config))
}

fn text(len: u32) -> Vec<u32> {
    (0..len).map(|p| (p * p + 7 * p) % 251).collect()
}

/// Runs `request` and asserts that its samples are those alone; how many of the prompt's tokens
/// the first of them found in the cache, and how many tokens were computed.
fn run_one(
    model: &TinyModel,
    setup: &Setup,
    engine: &mut Engine,
    request: &Request,
) -> (usize, u64) {
    let before = engine.stats().num_computed_tokens;
    let outputs = run_groups(engine, std::slice::from_ref(request)).remove(0);
    let got: Vec<Fingerprint> = outputs.iter().map(Fingerprint::from).collect();
    assert_eq!(got, samples_alone(model, setup, request), "{request:?}");
    let computed = engine.stats().num_computed_tokens - before;
    (outputs[0].metrics.num_cached_tokens, computed)
}

#[test]
fn a1_a_prompt_found_whole_computes_its_last_token_and_extensions_hit() {
    let model = TinyModel::new(1);
    for setup in Setup::every() {
        for (block_size, ahead) in [(8, false), (16, true), (16, false), (32, true), (64, false)] {
            let block = block_size as u32;
            let mut engine = engine(
                &model,
                &setup,
                EngineConfig { block_size, async_scheduling: ahead, ..Default::default() },
            );
            let logprobs = Some(NumLogprobs::Top(3));
            let params = SamplingParams { logprobs, ..greedy(20) };
            let two = Request::new(text(2 * block), params.clone());
            let mut run = |request: &Request| run_one(&model, &setup, &mut engine, request);
            assert_eq!(run(&two), (0, 2 * u64::from(block) + 19));
            // The last token is computed for its logits, and 19 that were sampled.
            assert_eq!(run(&two), (2 * block_size - 1, 20));
            let three = Request::new(text(3 * block), params.clone());
            assert_eq!(run(&three), (2 * block_size, u64::from(block) + 19));
            assert_eq!(run(&three), (3 * block_size - 1, 20));
            assert_eq!(run(&two), (2 * block_size - 1, 20));
            // One token more or less than whole blocks.
            let less = Request::new(text(2 * block - 1), params.clone());
            assert_eq!(run(&less).0, block_size);
            let more = Request::new(text(2 * block + 1), params);
            assert_eq!(run(&more), (2 * block_size, 20));
        }
    }
}

#[test]
fn a_conversation_finds_the_answers_it_goes_on_from() {
    let model = TinyModel::new(1);
    for setup in Setup::every() {
        for ahead in [false, true] {
            let mut engine = engine(
                &model,
                &setup,
                EngineConfig { async_scheduling: ahead, ..Default::default() },
            );
            let mut turns = text(21);
            for _ in 0..4 {
                let params = SamplingParams { temperature: 0.8, seed: Some(5), ..greedy(23) };
                let request = Request::new(turns.clone(), params);
                let alone = run_one(&model, &setup, &mut engine, &request);
                // Prompt and answer of the turn before, but its last token, in whole blocks.
                let known = if turns.len() == 21 { 0 } else { turns.len() - 9 - 1 };
                assert_eq!(alone.0, known / 16 * 16);
                let output = run_groups(&mut engine, &[request]).remove(0).remove(0);
                turns.extend(output.token_ids);
                turns.extend(text(9));
            }
            engine.reset_prefix_cache();
            let request = Request::new(turns, greedy(2));
            assert_eq!(run_one(&model, &setup, &mut engine, &request).0, 0, "it was forgotten");
        }
    }
}

#[test]
fn a3_equal_prompts_of_one_step_share_what_the_step_writes() {
    let model = TinyModel::new(1);
    for setup in Setup::every() {
        for (len, budget) in [(32, 512), (32, 20), (33, 512), (40, 7)] {
            let requests = vec![Request::new(text(len), greedy(9)); 3];
            let mut engine = engine(
                &model,
                &setup,
                EngineConfig { max_num_batched_tokens: Some(budget), ..Default::default() },
            );
            let want = samples_alone(&model, &setup, &requests[0]);
            for group in run_groups(&mut engine, &requests) {
                assert_eq!([Fingerprint::from(&group[0])], want[..], "{len} tokens by {budget}");
            }
            assert!(engine.stats().scheduler.prefix_hits > 0);
        }
    }
}

/// Samples share the prompt's blocks, those that leave the window are given back once by each.
#[test]
fn a4_samples_with_windows_give_each_block_back_once() {
    for setup in Setup::every() {
        let windowed = TinyModel::with_windows(1, [Some(16), Some(9)]);
        let one_full = TinyModel::with_windows(1, [Some(16), None]);
        for prefix_caching in [false, true] {
            let config = EngineConfig { block_size: 8, prefix_caching, ..Default::default() };
            for (n, len) in [(2, 24), (2, 25), (3, 40), (4, 64)] {
                let params = SamplingParams { n, temperature: 1.0, seed: Some(1), ..greedy(40) };
                let request = Request::new(text(len), params);
                let mut engine = engine(&windowed, &setup, config.clone());
                for _ in 0..2 {
                    run_one(&windowed, &setup, &mut engine, &request);
                }
                let stats = engine.stats();
                assert!(stats.scheduler.num_window_freed > 0);
                // What one sample sees, the rest of the prompt, and a block to write for each.
                let most = n * 4 + len as usize / 8 + 1;
                assert!(stats.peak_blocks <= most, "{} blocks held", stats.peak_blocks);
                let mut engine = self::engine(&one_full, &setup, config.clone());
                run_one(&one_full, &setup, &mut engine, &request);
                assert_eq!(engine.stats().scheduler.num_window_freed, 0);
            }
        }
    }
}

/// What is found in the cache has no logits: such a request finds nothing, and leaves its blocks
/// for others.
#[test]
fn a6_prompt_logprobs_and_captured_logits_come_of_every_token() {
    let model = TinyModel::new(1);
    for setup in Setup::every() {
        let all = Some(NumLogprobs::Top(2));
        let params = SamplingParams { prompt_logprobs: all, ..greedy(6) };
        let asked = Request::new(text(33), params);
        let captured = Request { capture_logits: true, ..Request::new(text(33), greedy(6)) };
        let plain = Request::new(text(33), greedy(6));
        let mut engine = engine(&model, &setup, EngineConfig::default());
        for (request, cached) in
            [(&asked, 0), (&asked, 0), (&plain, 32), (&captured, 0), (&asked, 0), (&plain, 32)]
        {
            assert_eq!(run_one(&model, &setup, &mut engine, request).0, cached);
        }
        let output = run_groups(&mut engine, &[asked]).remove(0).remove(0);
        assert_eq!(output.prompt_logprobs.map(|all| all.len()), Some(32));
    }
}

#[test]
fn x44_salts_share_nothing_with_one_another() {
    let model = TinyModel::new(1);
    for setup in Setup::every() {
        let request = |salt: Option<&str>| {
            let cache_salt = salt.map(str::to_owned);
            Request::new(text(50), SamplingParams { cache_salt, ..greedy(4) })
        };
        let mut engine = engine(&model, &setup, EngineConfig::default());
        for (salt, cached) in [
            (None, 0),
            (Some("a"), 0),
            (Some("b"), 0),
            (Some("a"), 48),
            (None, 48),
            (Some("ab"), 0),
            (Some("b"), 48),
        ] {
            let (found, computed) = run_one(&model, &setup, &mut engine, &request(salt));
            assert_eq!((found, computed), (cached, 50 - cached as u64 + 3), "salt {salt:?}");
        }
        // Together too, where the others' blocks are in use.
        let mut engine = self::engine(&model, &setup, EngineConfig::default());
        let salts = [None, Some("a"), Some("b"), Some("a")];
        let groups = run_groups(&mut engine, &salts.map(request));
        let cached: Vec<usize> = groups.iter().map(|g| g[0].metrics.num_cached_tokens).collect();
        assert_eq!(cached, [0, 0, 0, 48]);
    }
}

#[test]
fn samples_compute_their_prompt_once_and_are_requests_of_their_own() {
    let model = TinyModel::new(1);
    for setup in Setup::every() {
        for (prefix_caching, ahead) in [(false, false), (false, true), (true, false), (true, true)]
        {
            // More samples than seats, and a prompt that ends within a block and at its end.
            for (n, seats, len) in [(3, 64, 37), (7, 3, 37), (5, 2, 48), (3, 1, 7)] {
                let params = SamplingParams {
                    n,
                    temperature: 1.1,
                    seed: Some(9),
                    logprobs: Some(NumLogprobs::Top(1)),
                    ..greedy(12)
                };
                let request = Request::new(text(len), params);
                let mut engine = engine(
                    &model,
                    &setup,
                    EngineConfig {
                        max_num_seqs: seats,
                        max_num_batched_tokens: Some(16),
                        prefix_caching,
                        async_scheduling: ahead,
                        ..Default::default()
                    },
                );
                let (_, computed) = run_one(&model, &setup, &mut engine, &request);
                let name = format!("n {n}, {seats} seats, {len} tokens, cache {prefix_caching}");
                let outputs = 12 * n as u64;
                let (whole, again) = (u64::from(len), u64::from(len) * n as u64);
                if n <= seats {
                    // A sample computes the last token of the prompt for its logits.
                    let shared = if prefix_caching { u64::from(len % 16) } else { 1 };
                    let most = whole + outputs + n as u64 * shared;
                    assert!(computed <= most, "{name}: {computed} tokens");
                } else {
                    assert!(computed < again + outputs || seats == 1, "{name}: {computed} tokens");
                }
                let stats = engine.stats().scheduler;
                assert!(stats.num_forks > 0 || prefix_caching || seats == 1, "{name}");
                assert!(stats.num_block_copies > 0 || stats.num_forks == 0 || len == 48, "{name}");
            }
        }
    }
}

#[test]
fn an_abort_of_samples_at_any_step_leaves_others_exact() {
    let model = TinyModel::new(1);
    let setup = &Setup::every()[0];
    let params = SamplingParams { n: 4, temperature: 1.0, seed: Some(3), ..greedy(10) };
    let samples = Request::new(text(29), params.clone());
    let twin = Request::new(text(29), SamplingParams { seed: Some(8), n: 2, ..params });
    let alone = samples_alone(&model, setup, &twin);
    for prefix_caching in [false, true] {
        for ahead in [false, true] {
            for steps in 0..16 {
                let mut engine = engine(
                    &model,
                    setup,
                    EngineConfig {
                        max_num_seqs: 3,
                        max_num_batched_tokens: Some(11),
                        max_model_len: Some(40),
                        block_size: 8,
                        num_blocks: Some(9),
                        prefix_caching,
                        async_scheduling: ahead,
                        ..Default::default()
                    },
                );
                let id = engine.add_request(samples.clone()).expect("valid");
                engine.add_request(twin.clone()).expect("valid");
                for _ in 0..steps {
                    engine.step().expect("the backend works");
                }
                engine.abort(id);
                engine.check_integrity();
                let outputs = drain(&mut engine);
                let got: Vec<Fingerprint> = outputs.iter().map(Fingerprint::from).collect();
                let name = format!("cache {prefix_caching}, ahead {ahead}, step {steps}");
                assert!(got.iter().eq(alone.iter().skip(2 - got.len())) || got == alone, "{name}");
                assert_eq!(engine.num_held_blocks(), 0, "{name}");
            }
        }
    }
}

/// With steps planned ahead, the token after an end is planned and its result thrown away.
#[test]
fn a_step_planned_past_an_end_brings_nothing() {
    let model = TinyModel::new(1);
    for setup in Setup::every() {
        let free = samples_alone(&model, &setup, &Request::new(text(20), greedy(30))).remove(0);
        let stop = free.token_ids[11];
        let mut engine =
            engine(&model, &setup, EngineConfig { async_scheduling: true, ..Default::default() });
        let params = SamplingParams { stop_token_ids: vec![stop], ..greedy(30) };
        run_one(&model, &setup, &mut engine, &Request::new(text(20), params.clone()));
        assert!(engine.stats().scheduler.num_ended_in_flight > 0);
        let requests = [
            Request::new(text(20), SamplingParams { stop: words(&["a", "e"]), ..greedy(30) }),
            Request::new(text(20), SamplingParams { min_tokens: 14, ..params.clone() }),
            Request::new(text(20), SamplingParams { frequency_penalty: 1.0, ..params.clone() }),
            Request::new(text(20), SamplingParams { bad_words: words(&["a"]), ..params }),
            Request { capture_logits: true, ..Request::new(text(20), greedy(30)) },
        ];
        for request in &requests {
            run_one(&model, &setup, &mut engine, request);
        }
        for (group, request) in run_groups(&mut engine, &requests).iter().zip(&requests) {
            let got = [Fingerprint::from(&group[0])];
            assert_eq!(got, samples_alone(&model, &setup, request)[..]);
        }
        assert_eq!(engine.num_held_blocks(), 0);
    }
}
