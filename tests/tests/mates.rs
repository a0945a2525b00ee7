//! A request's result does not change with its mates' parameters or their order: they may ask for
//! anything, fail, or run a processor that panics. And the `n` samples of a request are as many
//! requests.

use quire_engine::sampling::{NumLogprobs, RowError};
use quire_engine::{
    DType, Engine, EngineConfig, FinishReason, Request, RequestOutput, SamplingParams,
};
use quire_tests::fixtures::{Setup, TinyModel};
use quire_tests::oracle::{Fingerprint, greedy, run_groups};
use quire_tests::processors::{self, PROCESSORS};
use quire_tests::rng::Rng;
use quire_tests::strategies::{LONGEST_ANY_REQUEST, any_request};

fn engine(model: &TinyModel, setup: &Setup) -> Engine {
    let mut engine = model.engine(setup);
    processors::register(&mut engine);
    engine
}

fn fingerprints(outputs: &[RequestOutput]) -> Vec<Fingerprint> {
    outputs.iter().map(Fingerprint::from).collect()
}

/// Requests that use every parameter between them.
fn fixed_requests() -> Vec<Request> {
    let top = Some(NumLogprobs::Top(2));
    let words = |words: &[&str]| words.iter().map(|&w| w.to_owned()).collect::<Vec<_>>();
    let drawn = SamplingParams { temperature: 0.9, seed: Some(77), ..greedy(10) };
    let penalised = SamplingParams {
        repetition_penalty: 1.2,
        presence_penalty: 0.5,
        frequency_penalty: -0.7,
        logprobs: top,
        ..drawn.clone()
    };
    let listed = SamplingParams {
        allowed_token_ids: Some((60..200).collect()),
        logit_bias: vec![(70, 3.0), (90, -4.0)],
        bad_words: words(&["a", "bc"]),
        logits_processor: Some("walk".into()),
        top_k: 30,
        top_p: 0.9,
        ..drawn.clone()
    };
    let samples = SamplingParams {
        n: 3,
        min_p: 0.01,
        stop: words(&["q", "zz"]),
        stop_token_ids: (0..9).collect(),
        min_tokens: 2,
        ..drawn
    };
    let prompted = SamplingParams { prompt_logprobs: top, logprobs: top, ..greedy(8) };
    let requests = [
        Request::new("a penalised one", penalised),
        Request::new("lists", listed),
        Request::new("samples", samples),
        Request { capture_logits: true, ..Request::new("the prompt's own", prompted) },
    ];
    requests.into()
}

/// Little room, so that some are preempted, and a budget that cuts prompts.
fn tight(rng: &mut Rng) -> EngineConfig {
    EngineConfig {
        max_num_seqs: 1 + rng.below(16),
        max_num_batched_tokens: Some(3 + rng.below(60)),
        max_model_len: Some(LONGEST_ANY_REQUEST),
        block_size: 8,
        num_blocks: Some(LONGEST_ANY_REQUEST.div_ceil(8) + rng.below(12)),
        ..Default::default()
    }
}

#[test]
fn mates_and_their_parameters_change_no_bit() {
    let model = TinyModel::new(1);
    let fixed = fixed_requests();
    for setup in [Setup::reference(DType::F32), Setup::cpu(DType::F32), Setup::cpu(DType::Bf16)] {
        let alone = |request: &Request| {
            let groups = run_groups(&mut engine(&model, &setup), std::slice::from_ref(request));
            fingerprints(&groups[0])
        };
        let alone: Vec<Vec<Fingerprint>> = fixed.iter().map(alone).collect();
        let mut rng = Rng::new(6);
        let (mut failed, mut preemptions) = (0, 0);
        for set in 0..24 {
            // Requests with the index of the fixed one, in random order.
            let mut batch: Vec<(Option<usize>, Request)> =
                (0..1 + rng.below(8)).map(|_| (None, any_request(&mut rng, &PROCESSORS))).collect();
            batch.extend(fixed.iter().enumerate().map(|(i, r)| (Some(i), r.clone())));
            rng.shuffle(&mut batch);
            let requests: Vec<Request> = batch.iter().map(|(_, r)| r.clone()).collect();
            let mut engine = engine(&model, &setup.with(tight(&mut rng)));
            let groups = run_groups(&mut engine, &requests);
            for ((fixed, _), group) in batch.iter().zip(&groups) {
                match fixed {
                    Some(i) => assert_eq!(fingerprints(group), alone[*i], "set {set}, request {i}"),
                    None => failed += group.iter().filter(|o| is_error(o)).count(),
                }
            }
            preemptions += engine.stats().num_preemptions();
        }
        assert!(failed > 10, "only {failed} mates failed");
        assert!(preemptions > 10, "only {preemptions} preemptions");
    }
}

fn is_error(output: &RequestOutput) -> bool {
    matches!(output.finish_reason, FinishReason::Error(_))
}

/// `any_request` is checked too: a request that the engine refuses would test nothing.
#[test]
fn the_order_of_a_batch_changes_no_result() {
    let model = TinyModel::new(2);
    for setup in [Setup::reference(DType::F32), Setup::cpu(DType::F32)] {
        let mut rng = Rng::new(8);
        let mut requests: Vec<Request> =
            (0..20).map(|_| any_request(&mut rng, &PROCESSORS)).collect();
        // The seed of an unseeded request is made from its number, which is the order.
        for (request, seed) in requests.iter_mut().zip(0..) {
            request.params.seed.get_or_insert(seed);
        }
        let mut order: Vec<usize> = (0..requests.len()).collect();
        let first = run_groups(&mut engine(&model, &setup.with(tight(&mut rng))), &requests);
        for _ in 0..4 {
            rng.shuffle(&mut order);
            let shuffled: Vec<Request> = order.iter().map(|&i| requests[i].clone()).collect();
            let groups = run_groups(&mut engine(&model, &setup.with(tight(&mut rng))), &shuffled);
            for (&i, group) in order.iter().zip(&groups) {
                assert_eq!(fingerprints(group), fingerprints(&first[i]), "{:?}", requests[i]);
            }
        }
    }
}

#[test]
fn n_samples_are_n_requests_with_the_next_seeds() {
    let model = TinyModel::new(1);
    for setup in [Setup::reference(DType::F32), Setup::cpu(DType::Bf16)] {
        for seed in [5, u64::MAX - 1] {
            let request = |n, seed| {
                let params = SamplingParams {
                    n,
                    temperature: 1.2,
                    seed: Some(seed),
                    frequency_penalty: 0.5,
                    logprobs: Some(NumLogprobs::Top(1)),
                    prompt_logprobs: Some(NumLogprobs::Top(1)),
                    ..greedy(12)
                };
                Request::new("three of one", params)
            };
            let samples = run_groups(&mut engine(&model, &setup), &[request(3, seed)]).remove(0);
            let singles = [0, 1, 2].map(|i| request(1, seed.wrapping_add(i)));
            let singles = run_groups(&mut engine(&model, &setup), &singles).concat();
            assert_eq!(fingerprints(&samples), fingerprints(&singles));
            let seeds =
                |outputs: &[RequestOutput]| outputs.iter().map(|o| o.seed).collect::<Vec<_>>();
            assert_eq!(seeds(&samples), seeds(&singles));
            assert_ne!(samples[0].token_ids, samples[1].token_ids);
            assert_ne!(samples[1].token_ids, samples[2].token_ids);
        }
    }
}

#[test]
fn a_processor_is_called_by_name_and_a_panic_in_it_fails_its_request_alone() {
    let model = TinyModel::new(1);
    for setup in [Setup::reference(DType::F32), Setup::cpu(DType::F32)] {
        let with = |processor: Option<&str>| {
            let logits_processor = processor.map(str::to_owned);
            Request::new("by name", SamplingParams { logits_processor, ..greedy(6) })
        };
        let run = |requests: &[Request]| run_groups(&mut engine(&model, &setup), requests).concat();
        let (plain, walk) = (run(&[with(None)]), run(&[with(Some("walk"))]));
        assert_ne!(plain[0].token_ids, walk[0].token_ids, "the processor does nothing");

        let requests = [with(Some("walk")), with(Some("panics")), with(None), with(Some("spoils"))];
        let together = run(&requests);
        assert_eq!(fingerprints(&together[..1]), fingerprints(&walk));
        assert_eq!(fingerprints(&together[2..3]), fingerprints(&plain));
        let error = |error: RowError| FinishReason::Error(error.to_string());
        assert_eq!(together[1].finish_reason, error(RowError::ProcessorPanicked));
        assert_eq!(together[1].token_ids, plain[0].token_ids[..2], "what came before stays");
        assert_eq!(together[3].finish_reason, error(RowError::NotANumber));

        let mut engine = engine(&model, &setup);
        let error = engine.add_request(with(Some("walks"))).unwrap_err().to_string();
        let expected =
            "logits_processor \"walks\" is not registered; registered: panics, spoils, walk";
        assert_eq!(error, expected);
        engine.check_integrity();
    }
}
