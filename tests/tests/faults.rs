//! What fails below the engine: a step of the backend, which may be tried again, and a token that
//! cannot be decoded, which ends its own request.

use quire_engine::engine::{LlmError, TextConfig};
use quire_engine::sampling::NumLogprobs;
use quire_engine::text::Tokenizer;
use quire_engine::{
    DType, Engine, EngineConfig, FinishReason, Llm, Request, RequestOutput, SamplingParams,
};
use quire_tests::failing::{Failing, Fault};
use quire_tests::fixtures::{Setup, TinyModel, byte_level};
use quire_tests::oracle::{Fingerprint, drain, greedy, run_all, run_groups};
use quire_tests::strategies::{LONGEST_REQUEST, mixed_requests};
use tokenizers::decoders::strip::Strip;

fn engine(model: &TinyModel, fault: impl Fn(usize) -> Option<Fault> + Send + 'static) -> Engine {
    engine_ahead(model, false, fault)
}

/// An engine that plans each step before the results of the one before are applied, or after.
fn engine_ahead(
    model: &TinyModel,
    async_scheduling: bool,
    fault: impl Fn(usize) -> Option<Fault> + Send + 'static,
) -> Engine {
    let setup = Setup::cpu(DType::F32).with(EngineConfig {
        async_scheduling: Some(async_scheduling),
        max_num_batched_tokens: Some(40),
        max_model_len: Some(LONGEST_REQUEST),
        block_size: 8,
        num_blocks: Some(LONGEST_REQUEST.div_ceil(8)),
        ..Default::default()
    });
    model.engine_with(&setup, model.text(), |executor| Failing::wrap(executor, fault))
}

fn fingerprints(outputs: &[RequestOutput]) -> Vec<Fingerprint> {
    outputs.iter().map(Fingerprint::from).collect()
}

/// The mixed requests, every third with its logits.
fn requests() -> Vec<Request> {
    let requests = mixed_requests(16, 31).into_iter().enumerate();
    let captured = |(i, r): (usize, Request)| Request { capture_logits: i.is_multiple_of(3), ..r };
    requests.map(captured).collect()
}

/// Steps until nothing is left, whatever fails; outputs in order and the number of failures.
fn drain_with_faults(engine: &mut Engine, ahead: bool) -> (Vec<RequestOutput>, usize) {
    let (mut outputs, mut failures) = (Vec::new(), 0);
    while engine.num_unfinished() > 0 {
        let stats = engine.stats();
        match engine.step() {
            Ok(step) => outputs.extend(step.finished),
            Err(error) => {
                assert_eq!(error.to_string(), "cannot allocate 7 bytes for a test");
                // The step before may have been waiting for its results to be collected.
                assert!(engine.stats().num_steps - stats.num_steps <= u64::from(ahead));
                let brought = engine.stats().num_generated_tokens - stats.num_generated_tokens;
                assert!(brought == 0 || ahead);
                failures += 1;
            }
        }
        engine.check_integrity();
    }
    outputs.sort_by_key(|output| output.request_id);
    (outputs, failures)
}

#[test]
fn a_failed_step_is_tried_again_and_changes_nothing() {
    let model = TinyModel::new(1);
    let requests = requests();
    for ahead in [false, true] {
        let mut undisturbed = engine_ahead(&model, ahead, |_| None);
        let expected = fingerprints(&run_all(&mut undisturbed, &requests));
        assert!(undisturbed.stats().num_preemptions() > 0, "the pool is too large to preempt");
        let last = undisturbed.stats().num_steps as usize;
        let run = |fault: Box<dyn Fn(usize) -> Option<Fault> + Send>| {
            let mut engine = engine_ahead(&model, ahead, fault);
            for request in &requests {
                engine.add_request(request.clone()).expect("a valid request");
            }
            let (outputs, failures) = drain_with_faults(&mut engine, ahead);
            assert_eq!(fingerprints(&outputs), expected);
            failures
        };
        for kind in [Fault::Before, Fault::After] {
            for at in [0, 1, 2, 3, 5, 8, 13, 21, last - 1] {
                assert_eq!(run(Box::new(move |call| (call == at).then_some(kind))), 1);
            }
            // Some steps take several tries.
            assert!(run(Box::new(move |call| (call % 7 < 4).then_some(kind))) > 10);
        }
    }
}

#[test]
fn a_batch_that_failed_leaves_nothing_behind() {
    let model = TinyModel::new(1);
    let requests = requests();
    let expected = fingerprints(&run_all(&mut engine(&model, |_| None), &requests));
    for (kind, ahead) in
        [Fault::Before, Fault::After].into_iter().flat_map(|kind| [(kind, false), (kind, true)])
    {
        for at in [0, 1, 9] {
            let engine = engine_ahead(&model, ahead, move |call| (call == at).then_some(kind));
            let mut llm = Llm::new(engine).with_progress(false);
            let failed = llm.generate(requests.clone()).expect_err("the backend fails");
            assert!(matches!(failed, LlmError::Engine(_)), "{failed}");
            assert_eq!((llm.engine().num_unfinished(), llm.engine().num_held_blocks()), (0, 0));
            llm.engine().check_integrity();
            // Another batch, in another order, gets its own outputs and no others.
            let reversed: Vec<Request> = requests.iter().rev().cloned().collect();
            let outputs = llm.generate(reversed).expect("the backend works again");
            let mut got = fingerprints(&outputs);
            got.reverse();
            assert_eq!(got, expected);
        }
    }
}

#[test]
fn a_batch_returns_its_own_outputs_alone() {
    let model = TinyModel::new(1);
    let own = [Request::new("own", greedy(9)), Request::new("mine", greedy(2))];
    let expected = fingerprints(&run_all(&mut engine(&model, |_| None), &own));
    let mut llm = Llm::new(engine(&model, |call| (call == 1).then_some(Fault::After)));
    llm = llm.with_progress(false);
    let foreign = Request::new("foreign", greedy(30));
    let id = llm.engine().add_request(foreign.clone()).expect("a valid request");
    llm.generate(own.to_vec()).expect_err("the backend fails");
    assert_eq!(llm.engine().num_unfinished(), 1, "the foreign request lives on");
    llm.engine().abort(id);
    llm.engine().add_request(foreign).expect("a valid request");
    let outputs = llm.generate(own.to_vec()).expect("the backend works again");
    assert_eq!(fingerprints(&outputs), expected);

    // A request that is refused leaves the batch without effect too.
    let bad = Request::new("bad", SamplingParams { top_p: 7.0, ..greedy(1) });
    let refused = llm.generate(vec![own[0].clone(), bad]).expect_err("top_p is refused");
    assert!(refused.to_string().starts_with("request 1: top_p"), "{refused}");
    assert_eq!((llm.engine().num_unfinished(), llm.engine().num_held_blocks()), (0, 0));
    assert_eq!(fingerprints(&llm.generate(own.to_vec()).expect("valid")), expected);
}

/// `Strip` at the end panics on a token that is shorter than what it may strip. No file with it is
/// accepted, but a tokenizer that was made in memory can have it.
#[test]
fn a_token_that_cannot_be_decoded_ends_its_request_alone() {
    let model = TinyModel::new(1);
    let mut inner = byte_level(&[]);
    inner.with_decoder(Some(Strip::new('Z', 0, 2)));
    let tokenizer = Tokenizer::from_inner(inner);
    let bad = tokenizer.token_to_id("Z").expect("a byte");
    let text = TextConfig { tokenizer: tokenizer.clone(), ..model.text() };
    let setup = Setup::cpu(DType::F32);
    let engine = || model.engine_with(&setup, text.clone(), |executor| executor);
    let request = |bias: f32, stream: bool| {
        let params = SamplingParams { logit_bias: vec![(bad, bias)], ..greedy(6) };
        Request { stream, ..Request::new(vec![1, 2, 3], params) }
    };
    let alone = fingerprints(&run_all(&mut engine(), &[request(-100.0, false)]));
    assert_eq!(alone[0].token_ids.len(), 6);
    for stream in [false, true] {
        let mut engine = engine();
        for bias in [-100.0, 100.0, -100.0] {
            engine.add_request(request(bias, stream)).expect("a valid request");
        }
        let outputs = drain(&mut engine);
        assert_eq!(fingerprints(&outputs[..1]), alone);
        assert_eq!(fingerprints(&outputs[2..]), alone);
        let FinishReason::Error(reason) = &outputs[1].finish_reason else {
            panic!("it ended with {:?}", outputs[1].finish_reason);
        };
        assert!(reason.starts_with("cannot decode tokens"), "{reason}");
        assert_eq!(engine.num_held_blocks(), 0);
    }
}

#[test]
fn one_bad_row_of_a_prompt_ends_its_request_and_no_other() {
    let model = TinyModel::new(1);
    let asked = SamplingParams { prompt_logprobs: Some(NumLogprobs::Top(0)), ..greedy(4) };
    let requests = [Request::new("the prompt", asked), Request::new("a mate", greedy(4))];
    let mate = Fingerprint::from(&run_all(&mut engine(&model, |_| None), &requests[1..])[0]);
    // The prompt has a row a position, the last of which samples.
    for row in 0.."the prompt".len() {
        let mut engine = engine(&model, move |call| (call == 0).then_some(Fault::Row(row)));
        let outputs = run_all(&mut engine, &requests);
        let failed = matches!(outputs[0].finish_reason, FinishReason::Error(_));
        assert!(failed && outputs[0].token_ids.is_empty(), "row {row}: {:?}", outputs[0]);
        assert_eq!(Fingerprint::from(&outputs[1]), mate, "row {row}");
        engine.check_integrity();
    }
}

/// The row of one sample, or of one beam, in any step of some requests.
#[test]
fn one_bad_row_ends_its_request_and_no_other_at_any_step() {
    let model = TinyModel::new(1);
    let drawn = SamplingParams { temperature: 1.0, seed: Some(2), ..greedy(9) };
    let beams = SamplingParams { use_beam_search: true, beam_width: Some(3), ..greedy(9) };
    let requests = [
        Request::new("one", greedy(12)),
        Request::new("three of one", SamplingParams { n: 3, ..drawn.clone() }),
        Request::new("a search", SamplingParams { n: 2, ..beams }),
        Request::new("penalised", SamplingParams { presence_penalty: 0.5, ..drawn }),
    ];
    for ahead in [false, true] {
        let alone = run_groups(&mut engine_ahead(&model, ahead, |_| None), &requests).concat();
        let mut failed = 0;
        for (step, row) in (0..14).flat_map(|step| [0, 1, 4, 7].map(|row| (step, row))) {
            let fault = move |call| (call == step).then_some(Fault::Row(row));
            let outputs = run_groups(&mut engine_ahead(&model, ahead, fault), &requests).concat();
            let mut bad = Vec::new();
            for (output, alone) in outputs.iter().zip(&alone) {
                if matches!(output.finish_reason, FinishReason::Error(_)) {
                    assert!(alone.token_ids.starts_with(&output.token_ids));
                    bad.push(output.request_id);
                } else {
                    assert_eq!(Fingerprint::from(output), Fingerprint::from(alone));
                }
            }
            let searched = outputs[4].request_id;
            let one = bad.len() <= 1 || bad == [searched, searched];
            assert!(one, "row {row} of step {step} ended {bad:?}");
            failed += usize::from(!bad.is_empty());
        }
        assert!(failed > 20, "only {failed} of the rows were there");
    }
}
