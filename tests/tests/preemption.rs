//! Preemption of either kind, at every step and in storms, changes no bit of a result.

use quire_engine::config::PreemptionMode;
use quire_engine::sampling::NumLogprobs;
use quire_engine::scheduler::{Policy, PreemptionCosts};
use quire_engine::{EngineConfig, Request, SamplingParams};
use quire_tests::fixtures::{Setup, TinyModel};
use quire_tests::oracle::{Fingerprint, greedy, preempt_after, run_groups, samples_alone};
use quire_tests::rng::Rng;

/// Bytes that hold more blocks than any of these tests has.
const ROOM: usize = 1 << 22;
/// Costs by which a copy is cheaper from a few tokens a block on.
const COSTS: PreemptionCosts =
    PreemptionCosts { recompute_ns_per_token: 10, swap_ns_per_block: 30 };

fn text(len: u32) -> Vec<u32> {
    (0..len).map(|p| (p * p + 3 * p) % 249).collect()
}

/// Requests of every kind, each no longer than 64 tokens.
fn victims() -> Vec<Request> {
    let drawn = SamplingParams { temperature: 0.9, seed: Some(4), ..greedy(18) };
    let top = Some(NumLogprobs::Top(2));
    let beams = SamplingParams { use_beam_search: true, beam_width: Some(3), ..greedy(18) };
    vec![
        Request::new(text(21), SamplingParams { logprobs: top, ..drawn.clone() }),
        Request::new(text(16), SamplingParams { presence_penalty: 1.0, ..drawn.clone() }),
        Request::new(text(21), SamplingParams { n: 3, ..drawn }),
        Request::new(text(30), SamplingParams { prompt_logprobs: top, ..greedy(8) }),
        Request { capture_logits: true, ..Request::new(text(9), greedy(12)) },
        Request::new(text(21), SamplingParams { n: 2, ..beams.clone() }),
        Request::new(text(24), SamplingParams { max_tokens: Some(40), ..beams }),
    ]
}

#[test]
fn a_request_preempted_at_any_step_goes_on_as_if_nothing_had_been() {
    let models = [TinyModel::new(1), TinyModel::with_windows(1, [Some(10), Some(6)])];
    for (setup, stride) in Setup::every().into_iter().zip([1, 5, 5]) {
        for model in &models {
            for (v, victim) in victims().iter().enumerate() {
                let alone = samples_alone(model, &setup, victim);
                let (mut recomputed, mut swapped) = (0, 0);
                for (k, (preemption, swap_bytes)) in [
                    (PreemptionMode::Recompute, 0),
                    (PreemptionMode::Swap, ROOM),
                    (PreemptionMode::Swap, 1 << 12),
                ]
                .into_iter()
                .enumerate()
                {
                    for steps in (1..44).step_by(stride) {
                        let config = EngineConfig {
                            max_num_seqs: 3,
                            max_num_batched_tokens: Some(8),
                            max_model_len: Some(64),
                            block_size: 8,
                            num_blocks: Some(24),
                            swap_bytes,
                            preemption,
                            policy: Policy::Priority { aging_steps: 100 },
                            // Each of the four ways for each kind of victim and of preemption.
                            prefix_caching: (steps + v) % 2 == 0,
                            async_scheduling: Some((steps / 2 + k) % 2 == 0),
                            ..Default::default()
                        };
                        let stats =
                            preempt_after(model, &setup.with(config), victim, &alone, steps);
                        recomputed += stats.num_preempted_recompute;
                        swapped += stats.num_preempted_swap;
                    }
                }
                assert!(recomputed > 0 && swapped > 0, "{recomputed} and {swapped}: {victim:?}");
            }
        }
    }
}

fn storm() -> Vec<Request> {
    let request = |i: usize| {
        let rng = &mut Rng::named(3, &format!("storm {i}"));
        let mut prompt = text(8 * (i as u32 % 3));
        prompt.extend((0..4 + rng.below(20)).map(|_| rng.below(256) as u32));
        let params = SamplingParams {
            temperature: [0.0, 1.0][i % 2],
            seed: Some(i as u64),
            presence_penalty: [0.0, 0.0, 0.7][i % 3],
            logprobs: Some(NumLogprobs::Top(1)),
            ..greedy(20)
        };
        Request::new(prompt, params)
    };
    (0..64).map(request).collect()
}

#[test]
fn a_storm_of_preemptions_changes_no_bit() {
    let model = TinyModel::new(1);
    let requests = storm();
    for setup in Setup::every() {
        let run = |config: EngineConfig| {
            let mut engine = model.engine(&setup.with(EngineConfig {
                max_num_seqs: 64,
                max_model_len: Some(64),
                block_size: 8,
                ..config
            }));
            let groups = run_groups(&mut engine, &requests);
            let got: Vec<Fingerprint> = groups.iter().map(|g| (&g[0]).into()).collect();
            let preemptions: u32 = groups.iter().map(|g| g[0].metrics.num_preemptions).sum();
            let stats = engine.stats();
            assert_eq!(u64::from(preemptions), stats.scheduler.num_preemptions());
            (got, stats)
        };
        let (calm, stats) = run(EngineConfig { prefix_caching: false, ..Default::default() });
        assert_eq!(stats.scheduler.num_preemptions(), 0);
        for (prefix_caching, ahead) in [(false, false), (true, true), (true, false)] {
            // Four sequences of the greatest length.
            let tight = EngineConfig {
                num_blocks: Some(4 * 64 / 8),
                swap_bytes: ROOM,
                prefix_caching,
                async_scheduling: Some(ahead),
                ..Default::default()
            };
            let run = |preemption, swap_bytes| {
                let config = EngineConfig { preemption, swap_bytes, ..tight.clone() };
                let (got, stats) = run(config);
                assert_eq!(got, calm, "{preemption:?} with {swap_bytes} bytes, ahead {ahead}");
                assert!(stats.peak_blocks <= 32);
                stats
            };
            let stats = run(PreemptionMode::Recompute, ROOM);
            let s = stats.scheduler;
            assert!(s.num_preempted_recompute > 20, "{s:?}");
            assert_eq!((s.num_preempted_swap, stats.swap_bytes), (0, 0));

            let stats = run(PreemptionMode::Swap, ROOM);
            let s = stats.scheduler;
            assert!(s.num_preempted_swap > 20, "{s:?}");
            assert_eq!(s.num_swap_fallbacks, 0);
            // What others share with a swapped sequence is taken back in need; then it is
            // computed anew.
            let back = s.num_blocks_swapped_in;
            assert!(back == s.num_blocks_swapped_out || prefix_caching && back > 0, "{s:?}");
            let moved = s.num_blocks_swapped_out + s.num_blocks_swapped_in;
            assert_eq!(stats.swap_bytes % moved, 0, "whole blocks");

            let s = run(PreemptionMode::Costs(COSTS), ROOM).scheduler;
            assert!(s.num_preempted_swap > 0 && s.num_preempted_recompute > 0, "{s:?}");

            // By costs measured at start, which may say either.
            let s = run(PreemptionMode::Auto, ROOM).scheduler;
            assert!(s.num_preemptions() > 20, "{s:?}");

            // Room for a block of f32, or two of bf16.
            let block = 2 * 2 * 2 * 16 * 4 * 8;
            let s = run(PreemptionMode::Swap, block).scheduler;
            assert!(s.num_swap_fallbacks > 20 && s.num_preempted_recompute > 20, "{s:?}");
        }
    }
}
