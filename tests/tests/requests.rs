//! What a request may rely on: refusals harm nobody, an abort or a NaN row ends one request and
//! gives its blocks back, stops do not leak, and parameters do what they say.

use quire_engine::backend::Isa;
use quire_engine::engine::{Prompt, RequestError};
use quire_engine::sampling::{
    NumLogprobs, RowError, Sampler, SamplingBatch, SamplingRow, sample_row,
};
use quire_engine::scheduler::AdmissionError;
use quire_engine::{
    DType, Engine, EngineConfig, FinishReason, Request, RequestOutput, SamplingParams, StopReason,
};
use quire_model_zoo::weights::{EMBED_TOKENS, LM_HEAD};
use quire_tests::fixtures::{MODEL_VOCAB, Place, Setup, TOKENIZER_VOCAB, TinyModel, every_path};
use quire_tests::oracle::{Fingerprint, drain, greedy, run_all, run_alone};
use quire_tests::strategies::{LONGEST_REQUEST, mixed_requests};

fn setup() -> Setup {
    Setup::cpu(DType::F32)
}

/// Greedy continuation of `prompt`, alone.
fn free_run(model: &TinyModel, prompt: &str, max_tokens: usize) -> RequestOutput {
    run_alone(model, &setup(), &Request::new(prompt, greedy(max_tokens)))
}

fn fingerprints(outputs: &[RequestOutput]) -> Vec<Fingerprint> {
    outputs.iter().map(Fingerprint::from).collect()
}

/// A few mates and what each gives alone.
fn mates(model: &TinyModel, setup: &Setup) -> (Vec<Request>, Vec<Fingerprint>) {
    let mates: Vec<Request> = mixed_requests(5, 9);
    let alone: Vec<RequestOutput> = mates.iter().map(|r| run_alone(model, setup, r)).collect();
    let fingerprints = fingerprints(&alone);
    (mates, fingerprints)
}

#[test]
fn refused_requests_leave_the_engine_usable_and_others_exact() {
    let model = TinyModel::new(1);
    let (mates, alone) = mates(&model, &setup());
    let mut engine = model.engine(&setup());
    let limit = engine.limits().max_model_len;
    let mut outputs = Vec::new();
    for mate in &mates {
        engine.add_request(mate.clone()).unwrap();
        let param = |params: SamplingParams| Request::new("x", params);
        let tokens = |tokens: Vec<u32>, max| Request::new(tokens, greedy(max));
        let refused: Vec<(Request, &str)> = vec![
            (Request::new("", greedy(1)), "prompt is empty"),
            (tokens(vec![1; limit], 1), "together 513 exceed the context of 512"),
            (tokens(vec![1; 8], limit - 7), "together 513"),
            (tokens(vec![MODEL_VOCAB as u32], 1), "id 272 is outside the vocabulary of 272"),
            (param(SamplingParams { max_tokens: Some(0), ..greedy(1) }), "max_tokens"),
            (param(SamplingParams { temperature: f32::NAN, ..greedy(1) }), "temperature"),
            (param(SamplingParams { temperature: -1.0, ..greedy(1) }), "temperature"),
            (param(SamplingParams { temperature: 1.0, top_p: 0.0, ..greedy(1) }), "top_p"),
            (param(SamplingParams { min_p: 1.5, ..greedy(1) }), "min_p"),
            (
                param(SamplingParams { logprobs: Some(NumLogprobs::Top(21)), ..greedy(1) }),
                "logprobs",
            ),
            (param(SamplingParams { min_tokens: 2, ..greedy(1) }), "min_tokens"),
            (param(SamplingParams { stop: vec![String::new()], ..greedy(1) }), "stop"),
            (param(SamplingParams { stop: vec!["a".into(); 1000], ..greedy(1) }), "stop"),
            (param(SamplingParams { stop_token_ids: vec![9999], ..greedy(1) }), "stop_token_ids"),
        ];
        for (request, text) in refused {
            let error = engine.add_request(request.clone()).unwrap_err().to_string();
            assert!(error.contains(text), "{error:?} for {request:?}");
        }
        outputs.extend(engine.step().unwrap().finished);
        engine.check_integrity();
    }
    // The exact limits are served.
    for (prompt, max_tokens) in [(limit - 1, 1), (8, limit - 8)] {
        let id = engine.add_request(Request::new(vec![1; prompt], greedy(max_tokens))).unwrap();
        assert_eq!(engine.abort(id).len(), 1);
    }
    let error = engine.add_request(Request::new(vec![1; limit - 7], greedy(8))).unwrap_err();
    let RequestError::Admission(error) = error else { panic!("{error}") };
    let expected = AdmissionError::TooLong { prompt: limit - 7, max_tokens: 8, limit };
    assert_eq!(error, expected);
    outputs.extend(drain(&mut engine));
    outputs.sort_by_key(|o| o.request_id);
    assert_eq!(fingerprints(&outputs), alone, "a mate of refused requests changed");
    assert_eq!(fingerprints(&run_all(&mut engine, &mates[..1])), alone[..1]);
}

#[test]
fn an_abort_at_any_step_gives_the_blocks_back_and_changes_no_mate() {
    let model = TinyModel::new(1);
    // Little room, so that the aborted one is waiting, prefilling, decoding or preempted.
    let tight = setup().with(EngineConfig {
        max_num_batched_tokens: Some(7),
        max_model_len: Some(LONGEST_REQUEST),
        block_size: 8,
        num_blocks: Some(LONGEST_REQUEST.div_ceil(8)),
        ..Default::default()
    });
    let (mates, alone) = mates(&model, &tight);
    let victim = Request::new(vec![7; 30], greedy(8));
    let victim_alone = run_alone(&model, &tight, &victim);
    let mut aborted = 0;
    for num_steps in 0..24 {
        let mut engine = model.engine(&tight);
        engine.add_request(mates[0].clone()).unwrap();
        let id = engine.add_request(victim.clone()).unwrap();
        for mate in &mates[1..] {
            engine.add_request(mate.clone()).unwrap();
        }
        let mut outputs = Vec::new();
        for _ in 0..num_steps {
            outputs.extend(engine.step().unwrap().finished);
        }
        let held = engine.num_held_blocks();
        let Some(output) = engine.abort(id).pop() else { continue };
        aborted += 1;
        engine.check_integrity();
        assert!(engine.num_held_blocks() <= held);
        assert!(engine.abort(id).is_empty(), "aborted twice");
        assert_eq!(output.finish_reason, FinishReason::Abort);
        assert!(victim_alone.token_ids.starts_with(&output.token_ids));
        outputs.extend(drain(&mut engine));
        outputs.sort_by_key(|o| o.request_id);
        assert_eq!(fingerprints(&outputs), alone, "aborted after {num_steps} steps");
        assert_eq!(engine.num_held_blocks(), 0);
    }
    assert!(aborted > 8, "the victim was live at {aborted} steps only");
}

#[test]
fn a_nan_row_fails_its_request_alone_and_leaks_through_no_block() {
    const POISON: u32 = 200;
    let mut model = TinyModel::new(1);
    model.row_mut(EMBED_TOKENS, POISON as usize).fill(f32::NAN);
    for (isa, dtype) in every_path() {
        let place = Place::Cpu { isa, threads: 2 };
        let setup = Setup { place, dtype, engine: EngineConfig::default() };
        let clean = |r: &Request| match &r.prompt {
            Prompt::Tokens(ids) => !ids.contains(&POISON),
            Prompt::Text(_) => true,
        };
        let mates: Vec<Request> = mixed_requests(12, 11).into_iter().filter(clean).collect();
        let alone: Vec<RequestOutput> =
            mates.iter().map(|r| run_alone(&model, &setup, r)).collect();
        let (mates, alone): (Vec<_>, Vec<_>) = mates
            .into_iter()
            .zip(alone)
            .filter(|(_, o)| !matches!(o.finish_reason, FinishReason::Error(_)))
            .unzip();
        assert!(mates.len() > 5, "too few mates never meet the poisoned token");
        // All blocks are used in turn, those that held the poisoned rows too.
        let tight = EngineConfig {
            max_num_seqs: 4,
            max_model_len: Some(LONGEST_REQUEST),
            block_size: 32,
            num_blocks: Some(11),
            ..Default::default()
        };
        let mut engine = model.engine(&setup.with(tight));
        let mut ids = Vec::new();
        for mate in &mates {
            let poisoned = vec![POISON; 40];
            engine.add_request(Request::new(poisoned, greedy(4))).unwrap();
            ids.push(engine.add_request(mate.clone()).unwrap());
        }
        let (good, bad): (Vec<_>, Vec<_>) =
            drain(&mut engine).into_iter().partition(|o| ids.contains(&o.request_id));
        assert_eq!(fingerprints(&good), fingerprints(&alone), "{isa} {dtype}");
        for output in bad {
            assert_eq!(output.finish_reason, not_a_number(), "{isa} {dtype}");
            assert!(output.token_ids.is_empty());
        }
    }
}

fn not_a_number() -> FinishReason {
    FinishReason::Error(RowError::NotANumber.to_string())
}

/// One NaN among finite logits fails the row too, unless it belongs to padding.
#[test]
fn a_single_nan_logit_fails_and_one_in_the_padding_does_not() {
    let run = |row: usize, temperature: f32| {
        let mut model = TinyModel::new(1);
        model.row_mut(LM_HEAD, row)[3] = f32::NAN;
        let params = SamplingParams { temperature, ..greedy(4) };
        run_alone(&model, &setup(), &Request::new("nan", params)).finish_reason
    };
    for temperature in [0.0, 1.0] {
        for row in [0, 100, TOKENIZER_VOCAB - 1] {
            assert_eq!(run(row, temperature), not_a_number(), "row {row}");
        }
        assert_eq!(run(TOKENIZER_VOCAB, temperature), FinishReason::Length);
    }
}

#[test]
fn a_stop_string_ends_the_text_before_it_and_never_leaks() {
    let model = TinyModel::new(1);
    let free = free_run(&model, "stop here", 40).text;
    let chars: Vec<(usize, char)> = free.char_indices().collect();
    assert!(chars.len() > 12, "{free:?} is too short to cut");
    for start in 2..8 {
        let stop = free[chars[start].0..chars[start + 2].0].to_owned();
        let cut = free.find(&stop).expect("a part of the text");
        let params = SamplingParams { stop: vec![stop.clone()], ..greedy(40) };
        let mut request = Request { stream: true, ..Request::new("stop here", params) };
        let (streamed, output) = stream(&mut model.engine(&setup()), &request);
        assert_eq!(output.text, free[..cut], "stop {stop:?}");
        assert_eq!(streamed, output.text, "the stop leaked into the stream");
        assert_eq!(output.finish_reason, FinishReason::Stop);
        assert_eq!(output.stop_reason, Some(StopReason::Text(stop.clone())));
        request.params.include_stop_str_in_output = true;
        let (streamed, output) = stream(&mut model.engine(&setup()), &request);
        assert_eq!((&*output.text, streamed), (&free[..cut + stop.len()], output.text.clone()));
    }
}

/// Runs one streaming request; its deltas joined, checked to carry every token, and its output.
fn stream(engine: &mut Engine, request: &Request) -> (String, RequestOutput) {
    engine.add_request(request.clone()).unwrap();
    let (mut text, mut ids, mut logprobs) = (String::new(), Vec::new(), Vec::new());
    loop {
        let mut step = engine.step().unwrap();
        for delta in step.deltas {
            text.push_str(&delta.text);
            ids.push(delta.token_id);
            logprobs.extend(delta.logprobs);
        }
        if let Some(output) = step.finished.pop() {
            assert_eq!(ids, output.token_ids);
            assert_eq!(logprobs, output.logprobs.clone().unwrap_or_default());
            return (text, output);
        }
    }
}

#[test]
fn deltas_join_to_the_text_and_logprobs_count_the_tokens() {
    let model = TinyModel::new(1);
    let engine = &mut model.engine(&setup());
    for request in mixed_requests(32, 21) {
        let alone = run_alone(&model, &setup(), &Request { stream: false, ..request.clone() });
        let (text, output) = stream(engine, &Request { stream: true, ..request.clone() });
        assert_eq!(text, output.text);
        assert_eq!(Fingerprint::from(&output), Fingerprint::from(&alone));
        assert_eq!(output.logprobs.is_some(), request.params.logprobs.is_some());
        for (at, token) in output.logprobs.iter().flatten().zip(&output.token_ids) {
            assert_eq!(at.sampled.token, *token);
            assert_eq!(at.top.len(), 3);
            assert!(at.top.is_sorted_by(|a, b| a.logprob >= b.logprob));
        }
        let count = output.logprobs.as_ref().map_or(output.token_ids.len(), Vec::len);
        assert_eq!(count, output.token_ids.len());
    }
}

#[test]
fn stop_ids_and_eos_end_a_request_unless_told_otherwise() {
    let model = TinyModel::new(1);
    let free = free_run(&model, "an end", 24).token_ids;
    let (place, &token) =
        free.iter().enumerate().rev().find(|(i, t)| !free[..*i].contains(t)).unwrap();
    assert!(place > 0, "{free:?} repeats one token");
    let run = |model: &TinyModel, params: SamplingParams| {
        run_alone(model, &setup(), &Request::new("an end", params))
    };
    // As a stop id of the request, even with ignore_eos.
    let stopped = run(&model, SamplingParams { stop_token_ids: vec![token], ..greedy(24) });
    assert_eq!(stopped.token_ids, free[..=place]);
    assert_eq!(stopped.stop_reason, Some(StopReason::Token(token)));
    // As the model's EOS.
    let mut ending = model.clone();
    ending.spec.eos = vec![token];
    let ends = run(&ending, SamplingParams { ignore_eos: false, ..greedy(24) });
    assert_eq!((ends.token_ids, ends.finish_reason), (free[..=place].to_vec(), FinishReason::Stop));
    let ignored = run(&ending, greedy(24));
    assert_eq!((ignored.token_ids, ignored.finish_reason), (free.clone(), FinishReason::Length));
    // Not before min_tokens: until then the token is not even sampled.
    let min_tokens = place + 3;
    let params = SamplingParams { ignore_eos: false, min_tokens, ..greedy(24) };
    let later = run(&ending, params).token_ids;
    assert!(later.len() >= min_tokens, "{later:?}");
    assert!(!later[..min_tokens].contains(&token), "{token} within {later:?}");
    assert_eq!(later[..place], free[..place]);
}

#[test]
fn a26_padded_vocabulary_is_never_sampled() {
    let mut model = TinyModel::new(1);
    for row in TOKENIZER_VOCAB..MODEL_VOCAB {
        model.row_mut(LM_HEAD, row).iter_mut().for_each(|w| *w *= 20.0);
    }
    for temperature in [0.0, 2.0] {
        let params = SamplingParams {
            temperature,
            seed: Some(3),
            logprobs: Some(NumLogprobs::Top(5)),
            ..greedy(32)
        };
        let request = Request { capture_logits: true, ..Request::new("padding", params) };
        let output = run_alone(&model, &setup(), &request);
        let padding_wins = |row: &Vec<f32>| {
            let max = |x: &[f32]| x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            max(&row[TOKENIZER_VOCAB..]) > max(&row[..TOKENIZER_VOCAB])
        };
        assert!(output.logits.iter().any(padding_wins), "padding is never the largest");
        let logprobs = output.logprobs.iter().flatten();
        let shown = logprobs.flat_map(|at| at.top.iter().map(|l| l.token));
        for id in output.token_ids.iter().copied().chain(shown) {
            assert!((id as usize) < TOKENIZER_VOCAB, "{id} is padding");
        }
    }
}

#[test]
fn a18_a_seed_gives_its_stream_whatever_the_mates_seed_is() {
    let model = TinyModel::new(1);
    let request =
        |seed| Request::new("seeds", SamplingParams { temperature: 1.0, seed, ..greedy(16) });
    let run = |seeds: [Option<u64>; 2]| run_all(&mut model.engine(&setup()), &seeds.map(request));
    let (a, b) = (run([Some(42), None]), run([Some(42), Some(7)]));
    assert_eq!(a[0].token_ids, b[0].token_ids);
    assert_eq!((a[0].seed, b[1].seed), (42, 7));
    assert_ne!(a[0].token_ids, b[1].token_ids);
    // The seed an unseeded request was given is reported, and gives its stream again.
    let again = run([Some(a[1].seed), None]);
    assert_eq!(again[0].token_ids, a[1].token_ids);
}

#[test]
fn a19_a_tiny_temperature_is_the_maximum() {
    for isa in Isa::available() {
        for (logits, best) in [([30.0, 10.0], 0), ([10.0, 30.0], 1)] {
            for temperature in [0.0, 1e-30, 1e-6, 1e-5, 1e-4] {
                for seed in 0..50 {
                    let row = SamplingRow { temperature, seed, position: 1, ..Default::default() };
                    let batch = SamplingBatch::default();
                    let out = sample_row(&mut Sampler::new(isa), &mut logits.clone(), &row, &batch);
                    assert_eq!(out.token, Ok(best), "{isa}, temperature {temperature}");
                }
            }
        }
    }
}

#[test]
fn captured_logits_come_once_a_position_through_preemption() {
    let model = TinyModel::new(1);
    let tight = setup().with(EngineConfig {
        max_num_batched_tokens: Some(9),
        max_model_len: Some(64),
        block_size: 8,
        num_blocks: Some(8),
        ..Default::default()
    });
    let requests: Vec<Request> = (0..4)
        .map(|i| Request {
            capture_logits: true,
            ..Request::new(vec![i + 1; 10 + i as usize], greedy(20))
        })
        .collect();
    let outputs = run_all(&mut model.engine(&tight), &requests);
    assert!(outputs.iter().any(|o| o.metrics.num_preemptions > 0), "nothing was preempted");
    for (request, output) in requests.iter().zip(&outputs) {
        assert_eq!(output.logits.len(), output.prompt_token_ids.len() + 20 - 1);
        let alone = run_alone(&model, &setup(), request);
        assert_eq!(Fingerprint::from(output), Fingerprint::from(&alone));
    }
}
