//! The scheduler's devices change no bit of a result: prefix cache, sharing among samples and
//! beams, chunks, preemption of either kind, priorities, static batches, steps planned ahead,
//! failed steps and aborts, alone and all together.

use quire_engine::sampling::NumLogprobs;
use quire_engine::{Engine, EngineConfig, Request, SamplingParams};
use quire_tests::fixtures::{Setup, TinyModel};
use quire_tests::mixes::{Catalogue, NUM_REQUESTS, assert_used, run_mixes, words};
use quire_tests::oracle::{Fingerprint, drain, greedy, run_groups, samples_alone};

fn cases(n: u32) -> u32 {
    n * std::env::var("QUIRE_TEST_EFFORT").map_or(1, |v| v.parse().expect("a number"))
}

#[test]
fn no_mix_of_everything_changes_a_bit() {
    let mut stats = Vec::new();
    for (setup, (seed, n)) in Setup::every().into_iter().zip([(1, 200), (2, 60), (3, 60)]) {
        let catalogue = Catalogue::new(TinyModel::new(1), &setup, NUM_REQUESTS);
        stats.extend(run_mixes(&catalogue, &setup, seed, cases(n)));
    }
    assert_used(&stats, false);
}

#[test]
fn no_mix_with_windows_changes_a_bit() {
    let mut stats = Vec::new();
    for (setup, (seed, n)) in Setup::every().into_iter().zip([(4, 200), (5, 60), (6, 60)]) {
        let model = TinyModel::with_windows(1, [Some(12), Some(20)]);
        let catalogue = Catalogue::new(model, &setup, NUM_REQUESTS);
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
                EngineConfig { block_size, async_scheduling: Some(ahead), ..Default::default() },
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
                EngineConfig { async_scheduling: Some(ahead), ..Default::default() },
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
                        async_scheduling: Some(ahead),
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
                        async_scheduling: Some(ahead),
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
        let mut engine = engine(
            &model,
            &setup,
            EngineConfig { async_scheduling: Some(true), ..Default::default() },
        );
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
