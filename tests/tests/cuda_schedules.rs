//! Nothing that the scheduler, the graphs or the driver's timing may do changes a bit on the CUDA
//! backend, and its tokens are those of the host's sampler on the same logits.
//!
//! All of it runs on a stand-in driver. In its lazy order work runs as late as the driver's
//! guarantees allow, so that a wait that is missing shows in a result.

use fakecuda::{Config, FakeCuda, Order};
use quire_engine::backend::CudaOptions;
use quire_engine::config::PreemptionMode;
use quire_engine::sampling::{NumLogprobs, RowError};
use quire_engine::scheduler::{Policy, SchedulerStats};
use quire_engine::{DType, Engine, EngineConfig, FinishReason, Request, SamplingParams};
use quire_model_zoo::spec::DecoderSpec;
use quire_tests::checked::{Checked, Coverage};
use quire_tests::fixtures::{Place, Setup, TinyModel};
use quire_tests::mixes::{Catalogue, run_mixes, words};
use quire_tests::oracle::{
    Fingerprint, drain, greedy, preempt_after, run_all, run_alone, run_groups, samples_alone,
};
use quire_tests::processors::{self, PROCESSORS};
use quire_tests::rng::Rng;
use quire_tests::strategies::any_request;

/// How far a log-probability may be from the host's.
const LOGPROB_ERROR: f32 = 2e-5;
/// Bytes that hold more blocks than any of these tests has.
const ROOM: usize = 4 << 20;
/// Tokens of prompt and output that none of [`requests`] exceeds.
const LONGEST: usize = 272;

fn text(len: u32, seed: u32) -> Vec<u32> {
    (0..len).map(|p| (p * p + 3 * p + 29 * seed) % 249).collect()
}

fn fingerprints(outputs: &[quire_engine::RequestOutput]) -> Vec<Fingerprint> {
    outputs.iter().map(Fingerprint::from).collect()
}

/// The device, with graphs or without.
fn device(dtype: DType, graphs: bool) -> Setup {
    let options = CudaOptions { enforce_eager: !graphs, ..Default::default() };
    Setup { place: Place::Cuda(options), ..Setup::cuda(dtype) }
}

/// Eight requests of one sample each; one goes on from one split of 256 positions to the next.
fn requests() -> Vec<Request> {
    let top = Some(NumLogprobs::Top(3));
    let drawn = SamplingParams { temperature: 0.9, seed: Some(5), ..greedy(18) };
    let filtered = SamplingParams { top_k: 20, top_p: 0.9, logprobs: top, ..drawn.clone() };
    let penalised = SamplingParams {
        repetition_penalty: 1.3,
        frequency_penalty: 0.4,
        logit_bias: vec![(101, 4.0), (32, -100.0)],
        ..drawn.clone()
    };
    let ended = SamplingParams {
        stop_token_ids: (0..60).collect(),
        min_tokens: 4,
        min_p: 0.02,
        ..drawn.clone()
    };
    vec![
        Request { capture_logits: true, ..Request::new(text(1, 1), greedy(20)) },
        Request::new(text(21, 2), SamplingParams { logprobs: top, ..drawn.clone() }),
        Request::new(text(16, 3), filtered),
        Request::new(text(9, 4), penalised),
        Request::new(text(40, 5), SamplingParams { prompt_logprobs: top, ..greedy(12) }),
        Request::new(text(17, 6), ended),
        Request::new(text(250, 7), SamplingParams { logprobs: top, ..greedy(12) }),
        Request::new(text(33, 8), drawn),
    ]
}

/// A way to run [`requests`].
#[derive(Clone, Copy, Debug)]
struct Way {
    seats: usize,
    block_size: usize,
    /// Tokens of a step.
    budget: usize,
    /// `None`: there is room for all.
    preemption: Option<PreemptionMode>,
    graphs: bool,
    ahead: bool,
    order: Order,
    /// The last request comes first.
    reversed: bool,
}

const WAY: Way = Way {
    seats: 8,
    block_size: 16,
    budget: 512,
    preemption: None,
    graphs: true,
    ahead: true,
    order: Order::Lazy,
    reversed: false,
};
const RECOMPUTE: Option<PreemptionMode> = Some(PreemptionMode::Recompute);
const SWAP: Option<PreemptionMode> = Some(PreemptionMode::Swap);

/// Each value of each setting at least twice, and what is delicate together.
const WAYS: [Way; 9] = [
    WAY,
    Way { seats: 1, ahead: false, block_size: 32, ..WAY },
    Way { graphs: false, budget: 24, reversed: true, ..WAY },
    Way { block_size: 32, budget: 7, order: Order::Eager, ..WAY },
    Way { block_size: 64, ahead: false, graphs: false, reversed: true, ..WAY },
    Way { preemption: RECOMPUTE, reversed: true, ..WAY },
    Way { preemption: RECOMPUTE, block_size: 64, budget: 40, graphs: false, reversed: true, ..WAY },
    Way { preemption: SWAP, reversed: true, ..WAY },
    Way {
        preemption: SWAP,
        block_size: 32,
        budget: 24,
        ahead: false,
        order: Order::Eager,
        reversed: true,
        ..WAY
    },
];

impl Way {
    fn engine(&self, model: &TinyModel, dtype: DType) -> Engine {
        // The long request and two blocks more: with these requests it preempts in every way.
        let tight = LONGEST.div_ceil(self.block_size) + 2;
        let ample = LONGEST.div_ceil(self.block_size) * self.seats;
        let config = EngineConfig {
            max_num_seqs: self.seats,
            max_num_batched_tokens: Some(self.budget),
            max_model_len: Some(LONGEST),
            block_size: self.block_size,
            num_blocks: Some(self.preemption.map_or(ample, |_| tight)),
            swap_bytes: if self.preemption == SWAP { ROOM } else { 0 },
            preemption: self.preemption.unwrap_or_default(),
            async_scheduling: Some(self.ahead),
            ..Default::default()
        };
        model.engine(&device(dtype, self.graphs).with(config))
    }

    /// Asserts that each request is as it is alone, and that the way was gone.
    fn check(&self, fake: &FakeCuda, model: &TinyModel, dtype: DType, alone: &[Fingerprint]) {
        fake.reset(&Config { order: self.order, ..Config::default() });
        let mut engine = self.engine(model, dtype);
        // Twice as many where some shall be preempted.
        let times = if self.preemption.is_some() { 2 } else { 1 };
        let mut order: Vec<usize> = (0..alone.len()).cycle().take(times * alone.len()).collect();
        if self.reversed {
            order.reverse();
        }
        let requests = requests();
        let ordered: Vec<Request> = order.iter().map(|&i| requests[i].clone()).collect();
        let outputs = run_all(&mut engine, &ordered);
        for (&request, output) in order.iter().zip(&outputs) {
            let got = Fingerprint::from(output);
            assert_eq!(got, alone[request], "{dtype}, {self:?}, request {request}");
        }
        let stats = engine.stats().scheduler;
        match self.preemption {
            None => assert_eq!(stats.num_preemptions(), 0),
            RECOMPUTE => assert!(stats.num_preempted_recompute > 0, "{self:?}: {stats:?}"),
            _ => assert!(stats.num_blocks_swapped_in > 0, "{self:?}: {stats:?}"),
        }
        assert_eq!(fake.stats().graph_launches > 0, self.graphs, "{self:?}");
        assert_eq!(engine.num_held_blocks(), 0);
    }
}

#[test]
fn every_way_gives_the_bits_of_a_request_run_alone() {
    let fake = FakeCuda::load(&Config::default());
    let model = TinyModel::aligned(1);
    for (dtype, ways) in [(DType::Bf16, &WAYS[..]), (DType::F32, &WAYS[7..8])] {
        let alone: Vec<Fingerprint> = requests()
            .iter()
            .map(|r| (&run_alone(&model, &device(dtype, dtype == DType::F32), r)).into())
            .collect();
        for way in ways {
            way.check(&fake, &model, dtype, &alone);
        }
    }
}

#[test]
fn a_prompt_found_in_the_cache_gives_the_same_bits() {
    let _fake = FakeCuda::load(&Config::default());
    let model = TinyModel::aligned(2);
    for block_size in [16, 32] {
        let config = EngineConfig { block_size, ..Default::default() };
        let setup = device(DType::Bf16, true).with(config);
        let mut engine = model.engine(&setup);
        let params = SamplingParams { temperature: 0.8, seed: Some(3), ..greedy(10) };
        for len in [40, 40, 64, 64, 80] {
            let request = Request::new(text(len, 1), params.clone());
            let outputs = run_groups(&mut engine, std::slice::from_ref(&request)).remove(0);
            assert_eq!(fingerprints(&outputs), samples_alone(&model, &setup, &request));
        }
        let hits = engine.stats().scheduler.prefix_hits;
        assert!(hits >= 32 + 32 + 63 + 64, "{hits} tokens found");
    }
}

/// Requests that are preempted, no longer than 64 tokens: drawn, forked, and searched for.
fn victims() -> Vec<Request> {
    let drawn = SamplingParams { temperature: 0.9, seed: Some(4), ..greedy(14) };
    let top = Some(NumLogprobs::Top(2));
    let beams = SamplingParams { use_beam_search: true, beam_width: Some(3), ..greedy(14) };
    vec![
        Request::new(text(37, 1), SamplingParams { logprobs: top, ..drawn.clone() }),
        Request::new(text(21, 2), SamplingParams { n: 3, ..drawn }),
        Request::new(text(21, 3), SamplingParams { n: 2, ..beams }),
    ]
}

#[test]
fn a_request_preempted_at_any_step_goes_on_as_if_nothing_had_been() {
    let _fake = FakeCuda::load(&Config::default());
    let model = TinyModel::aligned(1);
    for (v, victim) in victims().iter().enumerate() {
        let setup = device(DType::Bf16, true);
        let alone = samples_alone(&model, &setup, victim);
        let mut sum = (0, 0);
        for (preemption, swap_bytes) in
            [(PreemptionMode::Recompute, 0), (PreemptionMode::Swap, ROOM)]
        {
            for steps in [1, 2, 4, 7, 12] {
                let config = EngineConfig {
                    max_num_seqs: 3,
                    max_num_batched_tokens: Some(20),
                    max_model_len: Some(64),
                    num_blocks: Some(12),
                    swap_bytes,
                    preemption,
                    policy: Policy::Priority { aging_steps: 100 },
                    prefix_caching: (steps + v) % 2 == 0,
                    async_scheduling: Some(steps != 4),
                    ..Default::default()
                };
                let setup = device(DType::Bf16, steps != 7).with(config);
                let stats = preempt_after(&model, &setup, victim, &alone, steps);
                sum.0 += stats.num_preempted_recompute;
                sum.1 += stats.num_preempted_swap;
            }
        }
        assert!(sum.0 > 3 && sum.1 > 3, "{sum:?}: {victim:?}");
    }
}

/// Mixes of everything, with failed steps and aborts, against each request alone with graphs; some
/// with windows, whose blocks are freed. The seeds are of mixes that have something of all.
#[test]
fn no_mix_changes_a_bit() {
    let fake = FakeCuda::load(&Config::default());
    let mut stats: Vec<SchedulerStats> = Vec::new();
    let spec = TinyModel::aligned(1).spec;
    for (windows, runs) in [
        ([None, Some(40)], &[(20, Order::Lazy, true), (33, Order::Lazy, false)][..]),
        ([Some(12), Some(20)], &[(21, Order::Eager, true)]),
    ] {
        let model = TinyModel::of_spec(DecoderSpec { windows: windows.into(), ..spec.clone() }, 1);
        let catalogue = Catalogue::new(model, &device(DType::Bf16, true), 16);
        for &(seed, order, graphs) in runs {
            fake.reset(&Config { order, ..Config::default() });
            stats.extend(run_mixes(&catalogue, &device(DType::Bf16, graphs), seed, 4));
        }
    }
    let sum = |of: fn(&SchedulerStats) -> u64| stats.iter().map(of).sum::<u64>();
    for (what, count) in [
        ("hits", sum(|s| s.prefix_hits)),
        ("recomputations", sum(|s| s.num_preempted_recompute)),
        ("swaps", sum(|s| s.num_preempted_swap)),
        ("blocks swapped in", sum(|s| s.num_blocks_swapped_in)),
        ("forks", sum(|s| s.num_forks)),
        ("copies", sum(|s| s.num_block_copies)),
        ("cancelled steps", sum(|s| s.num_cancelled_steps)),
        ("ends under way", sum(|s| s.num_ended_in_flight)),
        ("window", sum(|s| s.num_window_freed)),
    ] {
        assert!(count > 0, "no {what}");
    }
}

/// Mates are aborted at every step; the blocks and rows that they leave are taken by others.
#[test]
fn mates_that_are_aborted_change_nothing() {
    let _fake = FakeCuda::load(&Config::default());
    let model = TinyModel::aligned(1);
    let setup = device(DType::Bf16, true);
    let requests = [1, 4, 7].map(|i| requests()[i].clone());
    let alone = requests.each_ref().map(|r| Fingerprint::from(&run_alone(&model, &setup, r)));
    for ahead in [true, false] {
        let config = EngineConfig {
            max_num_batched_tokens: Some(30),
            max_model_len: Some(96),
            num_blocks: Some(24),
            async_scheduling: Some(ahead),
            ..Default::default()
        };
        let mut engine = model.engine(&setup.with(config));
        let mut mates = Vec::new();
        for (i, request) in requests.iter().enumerate() {
            let mate = Request::new(text(30 + 7 * i as u32, 40), greedy(40));
            mates.extend([mate.clone(), mate].map(|m| engine.add_request(m).expect("valid")));
            engine.add_request(request.clone()).expect("valid");
        }
        let mut outputs = Vec::new();
        while let Some(mate) = mates.pop() {
            for _ in 0..3 {
                outputs.extend(engine.step().expect("the backend works").finished);
            }
            let aborted = engine.abort(mate);
            assert_eq!(aborted.len(), 1);
            assert_eq!(aborted[0].finish_reason, FinishReason::Abort);
            engine.check_integrity();
        }
        outputs.extend(drain(&mut engine));
        outputs.sort_by_key(|output| output.request_id);
        assert_eq!(fingerprints(&outputs), alone, "ahead {ahead}");
        assert_eq!(engine.num_held_blocks(), 0);
    }
}

/// A row of the embedding is NaN, and so is all that follows from it: keys, values and logits of the
/// request that has the token, and of no other, not even of those that get its blocks.
#[test]
fn a_row_that_is_not_a_number_ends_its_own_request_alone() {
    const POISON: u32 = 250;
    let _fake = FakeCuda::load(&Config::default());
    let mut model = TinyModel::aligned(1);
    model.row_mut("model.embed_tokens.weight", POISON as usize).fill(f32::NAN);
    let setup = device(DType::Bf16, true);
    let requests: Vec<Request> = requests().into_iter().take(6).collect();
    let alone: Vec<Fingerprint> =
        requests.iter().map(|r| (&run_alone(&model, &setup, r)).into()).collect();
    for (ahead, graphs, budget) in [(true, true, 512), (false, true, 24), (true, false, 24)] {
        let config = EngineConfig {
            max_num_seqs: 5,
            max_num_batched_tokens: Some(budget),
            max_model_len: Some(64),
            num_blocks: Some(12),
            async_scheduling: Some(ahead),
            ..Default::default()
        };
        let mut engine = model.engine(&device(DType::Bf16, graphs).with(config));
        let mut batch = Vec::new();
        for (i, request) in requests.iter().enumerate() {
            let mut prompt = text(12 + 4 * i as u32, 9);
            prompt[i] = POISON;
            batch.extend([request.clone(), Request::new(prompt, greedy(9))]);
        }
        let outputs = run_all(&mut engine, &batch);
        for (i, pair) in outputs.chunks_exact(2).enumerate() {
            assert_eq!(Fingerprint::from(&pair[0]), alone[i], "request {i}");
            let error = FinishReason::Error(RowError::NotANumber.to_string());
            assert_eq!((&pair[1].finish_reason, pair[1].token_ids.len()), (&error, 0));
        }
    }
}

/// Requests with every parameter, all choices made again on the host: on the device, and by it
/// where the device hands rows to it.
#[test]
fn tokens_are_those_of_the_hosts_sampler() {
    let _fake = FakeCuda::load(&Config::default());
    let model = TinyModel::aligned(1);
    let coverage = Coverage::default();
    let mut rng = Rng::new(11);
    for (dtype, graphs, ahead) in
        [(DType::Bf16, true, true), (DType::Bf16, false, false), (DType::F32, true, true)]
    {
        let mut requests: Vec<Request> =
            (0..24).map(|_| any_request(&mut rng, &PROCESSORS)).collect();
        // Without a processor a step is prepared while another is under way.
        requests.iter_mut().step_by(2).for_each(|r| r.params.logits_processor = None);
        let many = SamplingParams { logprobs: Some(NumLogprobs::Top(70)), ..greedy(6) };
        requests.push(Request::new(text(9, 3), many));
        let config = EngineConfig {
            max_num_seqs: 12,
            max_num_batched_tokens: Some(60),
            max_model_len: Some(64),
            num_blocks: Some(32),
            async_scheduling: Some(ahead),
            max_logprobs: 100,
            ..Default::default()
        };
        let setup = device(dtype, graphs).with(config);
        let mut engine = model.engine_with(&setup, model.text(), |executor| {
            Checked::wrap(executor, LOGPROB_ERROR, coverage.clone())
        });
        processors::register(&mut engine);
        run_groups(&mut engine, &requests);
    }
    coverage.assert_at_least(5);
}

/// Samples and beams share blocks, which are copied when they part.
#[test]
fn forks_are_requests_of_their_own() {
    let _fake = FakeCuda::load(&Config::default());
    let model = TinyModel::aligned(3);
    let samples = SamplingParams {
        n: 4,
        temperature: 1.1,
        seed: Some(9),
        logprobs: Some(NumLogprobs::Top(2)),
        bad_words: words(&["e", "ab"]),
        ..greedy(20)
    };
    let beams = SamplingParams { n: 3, use_beam_search: true, beam_width: Some(4), ..greedy(20) };
    let requests = [Request::new(text(21, 1), samples), Request::new(text(27, 2), beams)];
    for (block_size, graphs, ahead) in [(16, true, true), (32, false, false)] {
        let config = EngineConfig {
            block_size,
            max_num_batched_tokens: Some(16),
            async_scheduling: Some(ahead),
            ..Default::default()
        };
        let setup = device(DType::Bf16, graphs).with(config);
        let mut engine = model.engine(&setup);
        let groups = run_groups(&mut engine, &requests);
        for (request, group) in requests.iter().zip(&groups) {
            assert_eq!(fingerprints(group), samples_alone(&model, &setup, request));
            assert_ne!(group[0].token_ids, group[1].token_ids);
        }
        let stats = engine.stats().scheduler;
        assert!(stats.num_forks >= 3 && stats.num_block_copies > 3, "{stats:?}");
    }
}
