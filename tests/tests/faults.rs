//! What fails below the engine: a step of the backend, which may be tried again, and a token that
//! cannot be decoded, which ends its own request.

use quire_engine::engine::{LlmError, TextConfig};
use quire_engine::model::ModelInfo;
use quire_engine::ops::{BackendError, BackendInfo, BlockTransfers, ForwardInput, KvLayout};
use quire_engine::runner::{Executor, ExecutorOutput};
use quire_engine::sampling::{NumLogprobs, RowError, SampleOutput, SamplingBatch};
use quire_engine::text::Tokenizer;
use quire_engine::{
    DType, Engine, EngineConfig, FinishReason, Llm, Request, RequestOutput, SamplingParams,
};
use quire_tests::fixtures::{Setup, TinyModel, byte_level};
use quire_tests::oracle::{Fingerprint, drain, greedy, run_all};
use quire_tests::strategies::{LONGEST_REQUEST, mixed_requests};
use tokenizers::decoders::strip::Strip;

/// How a step fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Before anything is computed.
    Before,
    /// After everything was: the cache is written and results are there, but wrong.
    After,
    /// Not the step but one row, as if its logits were NaN.
    Row(usize),
}

/// An executor that fails at some of its calls.
struct Failing {
    inner: Box<dyn Executor>,
    /// The call, counted from 0 → whether and how it fails.
    fault: Box<dyn Fn(usize) -> Option<Fault> + Send>,
    num_calls: usize,
}

impl Executor for Failing {
    fn model(&self) -> &ModelInfo {
        self.inner.model()
    }

    fn backend(&self) -> BackendInfo {
        self.inner.backend()
    }

    fn kv_layout(&self) -> &KvLayout {
        self.inner.kv_layout()
    }

    fn num_swap_blocks(&self) -> usize {
        self.inner.num_swap_blocks()
    }

    fn transfer(&mut self, transfers: &BlockTransfers) -> Result<(), BackendError> {
        self.inner.transfer(transfers)
    }

    fn execute(
        &mut self,
        input: &ForwardInput,
        sampling: &SamplingBatch,
        capture: &[bool],
        out: &mut ExecutorOutput,
    ) -> Result<(), BackendError> {
        let fault = (self.fault)(self.num_calls);
        self.num_calls += 1;
        if fault != Some(Fault::Before) {
            self.inner.execute(input, sampling, capture, out)?;
        }
        if let Some(Fault::Row(row)) = fault {
            out.samples[row] = SampleOutput { token: Err(RowError::NotANumber), logprobs: None };
            return Ok(());
        }
        if fault.is_none() {
            return Ok(());
        }
        out.samples.iter_mut().for_each(|sample| sample.token = Ok(0));
        out.captured.iter_mut().for_each(|(_, logits)| logits.fill(f32::NAN));
        Err(BackendError::OutOfMemory { what: "a test".into(), bytes: 7 })
    }
}

fn engine(model: &TinyModel, fault: impl Fn(usize) -> Option<Fault> + Send + 'static) -> Engine {
    let setup = Setup::cpu(DType::F32).with(EngineConfig {
        max_num_batched_tokens: 40,
        max_model_len: Some(LONGEST_REQUEST),
        block_size: 8,
        num_blocks: Some(LONGEST_REQUEST.div_ceil(8)),
        ..Default::default()
    });
    let wrap = |inner| -> Box<dyn Executor> {
        Box::new(Failing { inner, fault: Box::new(fault), num_calls: 0 })
    };
    model.engine_with(&setup, model.text(), wrap)
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
fn drain_with_faults(engine: &mut Engine) -> (Vec<RequestOutput>, usize) {
    let (mut outputs, mut failures) = (Vec::new(), 0);
    while engine.num_unfinished() > 0 {
        let stats = engine.stats();
        match engine.step() {
            Ok(step) => outputs.extend(step.finished),
            Err(error) => {
                assert_eq!(error.to_string(), "cannot allocate 7 bytes for a test");
                assert_eq!(engine.stats().num_steps, stats.num_steps);
                assert_eq!(engine.stats().num_generated_tokens, stats.num_generated_tokens);
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
    let mut undisturbed = engine(&model, |_| None);
    let expected = fingerprints(&run_all(&mut undisturbed, &requests));
    assert!(undisturbed.stats().num_preemptions > 0, "the pool is too large to preempt");
    let last = undisturbed.stats().num_steps as usize;
    let run = |fault: Box<dyn Fn(usize) -> Option<Fault> + Send>| {
        let mut engine = engine(&model, fault);
        for request in &requests {
            engine.add_request(request.clone()).expect("a valid request");
        }
        let (outputs, failures) = drain_with_faults(&mut engine);
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

#[test]
fn a_batch_that_failed_leaves_nothing_behind() {
    let model = TinyModel::new(1);
    let requests = requests();
    let expected = fingerprints(&run_all(&mut engine(&model, |_| None), &requests));
    for kind in [Fault::Before, Fault::After] {
        for at in [0, 1, 9] {
            let engine = engine(&model, move |call| (call == at).then_some(kind));
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
