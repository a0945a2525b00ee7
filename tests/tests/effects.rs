//! What parameters do, measured from outside: log-probabilities are those of the logits, what is
//! forbidden never comes, what is forced does, and penalties tell the prompt from the output.

use proptest::prelude::*;
use proptest::sample::{Index, select};
use quire_engine::sampling::{EarlyStopping, NumLogprobs, TokenLogprobs};
use quire_engine::scheduler::Policy;
use quire_engine::text::Tokenizer;
use quire_engine::{
    DType, EngineConfig, FinishReason, Request, RequestOutput, SamplingParams, StopReason,
};
use quire_tests::fixtures::{
    EOS, MODEL_VOCAB, Setup, TOKENIZER_VOCAB, TinyModel, byte_level, byte_tokenizer,
};
use quire_tests::oracle::{Fingerprint, drain, greedy, run_all, run_alone, run_groups};
use std::collections::BTreeSet;

fn setup() -> Setup {
    Setup::cpu(DType::F32)
}

fn run(model: &TinyModel, prompt: &str, params: &SamplingParams) -> RequestOutput {
    run_alone(model, &setup(), &Request::new(prompt, params.clone()))
}

/// The id of a token that is one ASCII character.
fn id(c: char) -> u32 {
    byte_tokenizer().encode(&c.to_string(), false).unwrap()[0]
}

/// ln softmax of a row of logits without its padding.
fn log_softmax(row: &[f32]) -> Vec<f64> {
    let row = &row[..TOKENIZER_VOCAB];
    let max = row.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x.into()));
    let sum: f64 = row.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    row.iter().map(|&x| f64::from(x) - max - sum.ln()).collect()
}

/// Asserts that `at` has the log-probabilities of `row`, and the best `n` ids of it.
fn assert_logprobs(at: &TokenLogprobs, token: u32, row: &[f32], n: usize) {
    let expected = log_softmax(row);
    assert_eq!(at.sampled.token, token);
    let mut best: Vec<u32> = (0..TOKENIZER_VOCAB as u32).collect();
    best.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
    assert!(at.top.iter().map(|l| l.token).eq(best[..n].iter().copied()), "{:?}", at.top);
    for got in at.top.iter().chain([&at.sampled]) {
        let want = expected[got.token as usize];
        let error = (f64::from(got.logprob) - want).abs();
        assert!(error < 1e-5, "token {}: {} instead of {want}", got.token, got.logprob);
    }
}

fn long_prompts() -> Vec<Request> {
    let top = Some(NumLogprobs::Top(3));
    let params = SamplingParams { prompt_logprobs: top, logprobs: top, ..greedy(12) };
    let prompt = |i: u32, len: u32| (0..len).map(|p| (p * p + 7 * i) % 256).collect::<Vec<_>>();
    [(0, 150), (1, 90), (2, 97), (3, 64), (4, 65), (5, 1)]
        .map(|(i, len)| Request::new(prompt(i, len), params.clone()))
        .map(|request| Request { capture_logits: true, ..request })
        .into()
}

#[test]
fn logprobs_are_the_log_softmax_of_the_logits() {
    let model = TinyModel::new(1);
    for setup in [Setup::reference(DType::F32), setup()] {
        for request in long_prompts() {
            let output = run_alone(&model, &setup, &request);
            let ids = [&output.prompt_token_ids[..], &output.token_ids].concat();
            let prompt = output.prompt_logprobs.as_ref().expect("asked for");
            let sampled = output.logprobs.as_ref().expect("asked for");
            assert_eq!(prompt.len(), output.prompt_token_ids.len() - 1);
            assert_eq!(sampled.len(), output.token_ids.len());
            for (position, at) in prompt.iter().chain(sampled).enumerate() {
                assert_logprobs(at, ids[position + 1], &output.logits[position], 3);
            }
        }
    }
}

/// The prompts are longer than a slice of 64 rows, are cut by every budget, and give up their
/// blocks while half computed.
#[test]
fn prompt_logprobs_come_once_through_chunks_and_preemption() {
    let model = TinyModel::new(1);
    let requests = long_prompts();
    for setup in [Setup::reference(DType::F32), setup()] {
        let alone: Vec<Fingerprint> =
            requests.iter().map(|r| (&run_alone(&model, &setup, r)).into()).collect();
        let mut preemptions = 0;
        for budget in [1, 7, 64, 65, 300] {
            let mut engine = model.engine(&setup.with(EngineConfig {
                max_num_batched_tokens: Some(budget),
                max_model_len: Some(168),
                block_size: 8,
                num_blocks: Some(26),
                ..Default::default()
            }));
            // Without capture too: then rows of the prompt are there for their log-probability alone.
            for capture_logits in [true, false] {
                let requests: Vec<Request> =
                    requests.iter().map(|r| Request { capture_logits, ..r.clone() }).collect();
                for (output, alone) in run_all(&mut engine, &requests).iter().zip(&alone) {
                    let mut got = Fingerprint::from(output);
                    if !capture_logits {
                        got.logits.clone_from(&alone.logits);
                    }
                    assert_eq!(&got, alone, "budget {budget}");
                }
            }
            preemptions += engine.stats().num_preemptions();
        }
        assert!(preemptions > 4, "only {preemptions} preemptions");
    }
}

/// A free run over few letters, so that any two of them meet often.
fn letters(seed: u64, temperature: f32) -> SamplingParams {
    let allowed_token_ids = Some(byte_tokenizer().encode("abc é", false).unwrap());
    SamplingParams { seed: Some(seed), temperature, allowed_token_ids, ..greedy(40) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..Default::default() })]

    #[test]
    fn bad_words_never_appear(
        seed: u64,
        temperature in select(vec![0.0f32, 0.8, 2.0]),
        cuts in prop::collection::vec((any::<Index>(), 1..4usize, any::<bool>()), 1..4),
    ) {
        let model = TinyModel::new(1);
        let free = letters(seed, temperature);
        let text = run(&model, "words", &free).text;
        // Words that the free run does say.
        let chars: Vec<char> = text.chars().collect();
        let cut = |(at, len, space): &(Index, usize, bool)| {
            let from = chars[at.index(chars.len())..].iter();
            // Half a character has no spelling of its own.
            let word: String = from.take(*len).take_while(|&&c| c != '\u{FFFD}').collect();
            let word = word.trim_start().to_owned();
            if *space { format!(" {word}") } else { word }
        };
        let words: Vec<String> = cuts.iter().map(cut).filter(|w| !w.trim().is_empty()).collect();
        let params = SamplingParams { bad_words: words.clone(), ..free };
        let output = run(&model, "words", &params);
        for word in &words {
            let word = word.trim_start();
            prop_assert!(!output.text.contains(word), "{word:?} in {:?}", output.text);
        }
        if !words.is_empty() {
            prop_assert_ne!(output.text, text);
        }
    }

    #[test]
    fn only_allowed_ids_come(
        seed: u64,
        temperature in select(vec![0.0f32, 1.0, 5.0]),
        allowed in prop::collection::btree_set(0..TOKENIZER_VOCAB as u32, 1..12),
        forbidden in prop::collection::btree_set(0..TOKENIZER_VOCAB as u32, 0..12),
    ) {
        let model = TinyModel::new(1);
        let ids: Vec<u32> = allowed.iter().rev().copied().collect();
        let params = SamplingParams {
            seed: Some(seed),
            temperature,
            allowed_token_ids: Some(ids),
            logit_bias: forbidden.iter().map(|&id| (id, -100.0)).collect(),
            ..greedy(24)
        };
        let output = run(&model, "allowed", &params);
        prop_assert_eq!(output.token_ids.len(), 24);
        let left: BTreeSet<u32> = allowed.difference(&forbidden).copied().collect();
        let kept = if left.is_empty() { &allowed } else { &left };
        prop_assert!(output.token_ids.iter().all(|id| kept.contains(id)), "{:?}", output.token_ids);
    }

    #[test]
    fn a_bias_of_100_forces_a_token_and_min_tokens_holds_eos_back(
        seed: u64,
        temperature in select(vec![0.0f32, 1.0]),
        forced in 0..EOS,
        min_tokens in 0..12usize,
    ) {
        let model = TinyModel::new(1);
        let params = |logit_bias| SamplingParams {
            seed: Some(seed),
            temperature,
            logit_bias,
            min_tokens,
            ignore_eos: false,
            ..greedy(16)
        };
        let output = run(&model, "forced", &params(vec![(forced, 100.0), (EOS, -100.0)]));
        prop_assert_eq!(output.token_ids, vec![forced; 16]);
        // EOS beats all, but before min_tokens.
        let output = run(&model, "ended", &params(vec![(forced, 50.0), (EOS, 100.0)]));
        let mut expected = vec![forced; min_tokens];
        expected.push(EOS);
        prop_assert_eq!(output.token_ids, expected);
        prop_assert_eq!(output.finish_reason, FinishReason::Stop);
        prop_assert_eq!(output.stop_reason, Some(StopReason::Token(EOS)));
    }

    #[test]
    fn padding_never_comes_whatever_is_asked(
        seed: u64,
        temperature in select(vec![0.0f32, 1.0, 100.0]),
        top_k in 0..300u32,
        min_tokens in 0..4usize,
    ) {
        let mut model = TinyModel::new(1);
        let head = quire_model_zoo::weights::LM_HEAD;
        for row in TOKENIZER_VOCAB..MODEL_VOCAB {
            model.row_mut(head, row).iter_mut().for_each(|w| *w *= 20.0);
        }
        let logit_bias = (0..TOKENIZER_VOCAB as u32).map(|id| (id, -100.0)).collect();
        let params = SamplingParams {
            seed: Some(seed),
            temperature,
            top_k,
            min_tokens,
            logit_bias,
            repetition_penalty: 2.0,
            ..greedy(16)
        };
        let output = run(&model, "padding", &params);
        prop_assert!(output.token_ids.iter().all(|&id| (id as usize) < TOKENIZER_VOCAB));
    }
}

/// A word that is one token, with and without a space before it, and one that is several.
#[test]
fn bad_words_of_one_token_and_of_many() {
    let model = TinyModel::new(1);
    let merges = [("a", "b"), ("Ġ", "ab"), ("Ġ", "c")];
    let tokenizer = Tokenizer::from_inner(byte_level(&merges));
    let ids = |text: &str| tokenizer.encode(text, false).unwrap();
    let (word, spaced, many) = (ids("ab"), ids(" ab"), ids(" cab"));
    assert_eq!((word.len(), spaced.len(), many.len()), (1, 1, 2));
    let run = |bad_words: &[&str], seed| {
        let params = SamplingParams {
            bad_words: bad_words.iter().map(|&w| w.to_owned()).collect(),
            allowed_token_ids: Some([&word[..], &spaced, &many, &ids("cx")].concat()),
            seed: Some(seed),
            temperature: 2.0,
            ..greedy(60)
        };
        let text =
            quire_engine::engine::TextConfig { tokenizer: tokenizer.clone(), ..model.text() };
        let mut engine = model.engine_with(&setup(), text, |executor| executor);
        run_all(&mut engine, &[Request::new("x", params)]).remove(0).token_ids
    };
    let has = |output: &[u32], word: &[u32]| output.windows(word.len()).any(|w| w == word);
    for seed in 0..8 {
        let free = run(&[], seed);
        for ids in [&word, &spaced, &many] {
            assert!(has(&free, ids), "the free run never says {ids:?}");
        }
        for bad in ["ab", " ab"] {
            let output = run(&[bad], seed);
            assert!(!has(&output, &word) && !has(&output, &spaced), "{bad:?} in {output:?}");
        }
        let output = run(&["cab"], seed);
        assert!(!has(&output, &many) && !has(&output, &ids("cab")), "cab in {output:?}");
        assert!(has(&output, &word), "a part of a word is no word");
    }
}

#[test]
fn penalties_reduce_repetition() {
    let model = TinyModel::new(1);
    let distinct = |params: SamplingParams| {
        let ids = run(&model, "again and again", &params).token_ids;
        assert_eq!(ids.len(), 64);
        ids.into_iter().collect::<BTreeSet<u32>>().len()
    };
    let free = distinct(greedy(64));
    for params in [
        SamplingParams { repetition_penalty: 1.5, ..greedy(64) },
        SamplingParams { presence_penalty: 2.0, ..greedy(64) },
        SamplingParams { frequency_penalty: 2.0, ..greedy(64) },
    ] {
        let penalised = distinct(params.clone());
        assert!(penalised > free, "{penalised} distinct tokens, {free} without {params:?}");
    }
    let rewarded = distinct(SamplingParams { frequency_penalty: -2.0, ..greedy(64) });
    assert!(rewarded < free, "{rewarded} distinct tokens, {free} without the reward");
}

/// With such a penalty a seen token never comes again, while an unseen one has a positive logit.
#[test]
fn a21_repetition_counts_the_prompt_and_presence_and_frequency_do_not() {
    let model = TinyModel::new(1);
    let seen = id('a');
    let prompt = vec![seen, seen, id('b')];
    let request = |params| Request { capture_logits: true, ..Request::new(prompt.clone(), params) };
    let first = |params| run_alone(&model, &setup(), &request(params));
    let row = first(greedy(1)).logits.pop().expect("captured");
    let most = row[..TOKENIZER_VOCAB].iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // A token of the prompt leads by 1; a penalty of 2 would take that away.
    let lead = vec![(seen, most - row[seen as usize] + 1.0)];
    for (presence_penalty, frequency_penalty) in [(2.0, 0.0), (0.0, 2.0), (2.0, 2.0)] {
        let logit_bias = lead.clone();
        let params =
            SamplingParams { presence_penalty, frequency_penalty, logit_bias, ..greedy(1) };
        assert_eq!(first(params).token_ids, [seen]);
    }
    let output = first(SamplingParams { repetition_penalty: 1e6, ..greedy(24) });
    let mut all: BTreeSet<u32> = prompt.iter().copied().collect();
    for token in output.token_ids {
        assert!(all.insert(token), "{token} came again");
    }
    // Twice in the prompt counts once: the logit is divided by the penalty, not by its square.
    for times in 1..4 {
        let ids = [vec![id('b')], vec![seen; times]].concat();
        let params = SamplingParams { repetition_penalty: 1.3, ..greedy(1) };
        let request = Request { capture_logits: true, ..Request::new(ids, params) };
        let output = run_alone(&model, &setup(), &request);
        assert_eq!(output.token_ids[0], penalised_once(&output, 1.3), "{times} times");
    }
}

/// The argmax of the last row, with the logits of the prompt's tokens penalised once.
fn penalised_once(output: &RequestOutput, penalty: f32) -> u32 {
    let mut row = output.logits.last().expect("captured")[..TOKENIZER_VOCAB].to_vec();
    for &id in &output.prompt_token_ids.iter().copied().collect::<BTreeSet<u32>>() {
        let logit = &mut row[id as usize];
        *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
    }
    let best = (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b]));
    best.expect("a row") as u32
}

#[test]
fn the_smaller_priority_comes_first_where_the_policy_says_so() {
    let model = TinyModel::new(1);
    let first_to_end = |policy: Policy, priorities: [i32; 4]| {
        let config = EngineConfig { max_num_seqs: 1, policy, ..Default::default() };
        let mut engine = model.engine(&setup().with(config));
        let mut add = |priority| {
            let request = Request::new("first", SamplingParams { priority, ..greedy(8) });
            engine.add_request(request).expect("a valid request")
        };
        let ids = priorities.map(&mut add);
        let mut order = Vec::new();
        while engine.num_unfinished() > 0 {
            let finished = engine.step().expect("the backend works").finished;
            let place = |o: &RequestOutput| ids.iter().position(|&id| id == o.request_id);
            order.extend(finished.iter().filter_map(place));
        }
        (order, engine.stats().scheduler.num_preemptions())
    };
    let priority = Policy::Priority { aging_steps: 1000 };
    let (most, least) = (i32::MIN, i32::MAX);
    assert_eq!(first_to_end(priority, [0, 7, least, most]).0, [3, 0, 1, 2]);
    assert_eq!(first_to_end(priority, [1, 1, 0, 1]).0, [2, 0, 1, 3]);
    assert_eq!(first_to_end(Policy::Fcfs, [0, 7, least, most]), (vec![0, 1, 2, 3], 0));

    // One that is running makes way, and goes on as if nothing had been.
    let config = EngineConfig { max_num_seqs: 1, policy: priority, ..Default::default() };
    let mut engine = model.engine(&setup().with(config));
    let low = Request::new("low", SamplingParams { priority: 1, ..greedy(8) });
    engine.add_request(low.clone()).expect("a valid request");
    (0..4).for_each(|_| assert!(engine.step().expect("the backend works").finished.is_empty()));
    let high = engine.add_request(Request::new("high", greedy(4))).expect("a valid request");
    (0..4).for_each(|_| assert!(engine.num_unfinished() == 2 && engine.step().is_ok()));
    assert!(engine.abort(high).is_empty(), "it has ended first");
    let output = drain(&mut engine).remove(0);
    assert_eq!(output.metrics.num_preemptions, 1);
    let alone = run_alone(&model, &setup(), &low);
    assert_eq!(Fingerprint::from(&output), Fingerprint::from(&alone));
}

/// Why an engine refuses `params`.
fn refusal(params: SamplingParams) -> String {
    let mut engine = TinyModel::new(1).engine(&setup());
    engine.add_request(Request::new("x", params)).expect_err("a bad parameter").to_string()
}

#[test]
fn a_cache_salt_keeps_prefixes_apart() {
    let model = TinyModel::new(1);
    let mut engine = model.engine(&setup());
    let mut cached = |salt: Option<&str>| {
        let cache_salt = salt.map(str::to_owned);
        let request = Request::new("x".repeat(40), SamplingParams { cache_salt, ..greedy(2) });
        run_all(&mut engine, &[request]).remove(0).metrics.num_cached_tokens
    };
    let salts = [None, Some("a"), Some("b"), Some("a"), None];
    assert_eq!(salts.map(&mut cached), [0, 0, 0, 32, 32]);
    for salt in ["".to_owned(), "s".repeat(1025)] {
        let bytes = salt.len();
        let error = refusal(SamplingParams { cache_salt: Some(salt), ..greedy(1) });
        assert_eq!(error, format!("cache_salt must be 1 to 1024 bytes, got {bytes} bytes"));
    }
}

/// A search for the best `width` sequences, which may end at some letters.
fn search(width: usize, max_tokens: usize) -> SamplingParams {
    let stop_token_ids = (b'a'..=b'p').map(|c| id(char::from(c))).collect();
    SamplingParams { n: width, use_beam_search: true, stop_token_ids, ..greedy(max_tokens) }
}

/// Outputs of some searches, and the steps they took.
fn searches(params: &SamplingParams) -> (Vec<Vec<RequestOutput>>, u64) {
    let model = TinyModel::new(1);
    let mut steps = 0;
    let run = |i: u32| {
        let mut engine = model.engine(&setup());
        let request = Request::new(vec![i, 2 * i, 77], params.clone());
        let group = run_groups(&mut engine, &[request]).remove(0);
        steps += engine.stats().num_steps;
        group
    };
    ((1..9).map(run).collect(), steps)
}

/// The sum of the log-probabilities of the best of each.
fn total(groups: &[Vec<RequestOutput>]) -> f64 {
    groups.iter().map(|g| g[0].beam.expect("found by beam search").cumulative_logprob).sum()
}

#[test]
fn beams_find_what_is_more_likely_and_wider_ones_more_so() {
    let fixed = |width: usize| SamplingParams {
        n: 1,
        beam_width: Some(width),
        stop_token_ids: Vec::new(),
        ..search(1, 12)
    };
    let (narrow, _) = searches(&fixed(1));
    let (wide, _) = searches(&fixed(8));
    assert!(total(&wide) > total(&narrow) + 1.0, "{} and {}", total(&wide), total(&narrow));
    // One beam is greedy.
    let greedy = searches(&greedy(12)).0;
    for (beam, greedy) in narrow.iter().zip(&greedy) {
        assert_eq!((&beam[0].token_ids, &beam[0].text), (&greedy[0].token_ids, &greedy[0].text));
        assert_eq!(greedy[0].beam, None);
    }
    // All that were found, best first, none twice.
    let (all, _) = searches(&search(5, 10));
    for group in &all {
        let scores: Vec<f64> = group.iter().filter_map(|o| o.beam.map(|b| b.score)).collect();
        assert!(scores.len() == 5 && scores.is_sorted_by(|a, b| a >= b), "{scores:?}");
        let distinct: BTreeSet<&Vec<u32>> = group.iter().map(|o| &o.token_ids).collect();
        assert_eq!(distinct.len(), 5);
    }
    for (params, text) in [
        (SamplingParams { temperature: 0.5, ..search(2, 4) }, "temperature must be 0 with"),
        (SamplingParams { n: 65, ..search(2, 4) }, "n must be at most 64 with use_beam_search"),
        (SamplingParams { beam_width: Some(65), ..search(2, 4) }, "from n (2) to 64, got 65"),
        (SamplingParams { beam_width: Some(1), ..search(2, 4) }, "from n (2) to 64, got 1"),
        (SamplingParams { beam_width: Some(2), ..self::greedy(4) }, "beam_width must be unset"),
        (SamplingParams { n: 2, ..self::greedy(4) }, "n must be 1 with temperature 0"),
    ] {
        let error = refusal(params);
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn a_length_penalty_makes_sequences_longer_or_shorter() {
    let length = |length_penalty| {
        let (groups, _) = searches(&SamplingParams { length_penalty, ..search(4, 16) });
        groups.iter().map(|group| group[0].token_ids.len()).sum::<usize>()
    };
    let lengths = [-2.0, 0.0, 1.0, 3.0].map(length);
    assert!(
        lengths.is_sorted() && lengths[0] < lengths[2] && lengths[2] < lengths[3],
        "{lengths:?}"
    );
    for x in [f32::NAN, f32::INFINITY] {
        let error = refusal(SamplingParams { length_penalty: x, ..search(2, 4) });
        assert!(error.starts_with("length_penalty must be finite"), "{error}");
    }
    let error = refusal(SamplingParams { length_penalty: 2.0, ..greedy(4) });
    assert!(error.starts_with("length_penalty must be 1 without use_beam_search"), "{error}");
}

#[test]
fn a_search_stops_the_earlier_the_less_it_looks_for() {
    let run = |early_stopping| {
        searches(&SamplingParams { early_stopping, length_penalty: 1.0, ..search(4, 24) })
    };
    let (always, heuristic, never) =
        (run(EarlyStopping::Always), run(EarlyStopping::Heuristic), run(EarlyStopping::Never));
    let steps = [always.1, heuristic.1, never.1];
    assert!(steps.is_sorted() && steps[0] < steps[1] && steps[1] < steps[2], "{steps:?}");
    let best = |groups: &[Vec<RequestOutput>]| {
        groups.iter().map(|g| g[0].beam.expect("found by beam search").score).sum::<f64>()
    };
    let scores = [best(&always.0), best(&heuristic.0), best(&never.0)];
    assert!(scores.is_sorted() && scores[0] < scores[2], "{scores:?}");
    let early_stopping = EarlyStopping::Always;
    let error = refusal(SamplingParams { early_stopping, ..greedy(4) });
    assert!(error.starts_with("early_stopping must be false without use_beam_search"), "{error}");
}
