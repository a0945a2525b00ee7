//! A request's tokens, text, logprobs and logits are the same bits whatever is beside it, however
//! its prompt is chunked, preempted or not, for every block size, on one thread or two; and the
//! CPU's are the reference's within its arithmetic.

use quire_engine::backend::Isa;
use quire_engine::{DType, EngineConfig, Request, RequestOutput};
use quire_tests::fixtures::{Place, QUANTISED, Setup, TinyModel, every_path};
use quire_tests::oracle::{Fingerprint, greedy, run_all, run_alone};
use quire_tests::strategies::{LONGEST_REQUEST, mixed_requests};

const NUM_REQUESTS: usize = 64;
/// The smallest pools: what the longest request needs in blocks of 8 and of 32.
const POOL_8: usize = LONGEST_REQUEST.next_multiple_of(8);
const POOL_32: usize = LONGEST_REQUEST.next_multiple_of(32);

/// One way to run the same requests.
struct Run {
    max_num_seqs: usize,
    block_size: usize,
    max_num_batched_tokens: usize,
    threads: usize,
    /// Tokens the KV pool holds; little more than one sequence makes the rest be preempted.
    pool_tokens: usize,
    /// The order of arrival, as indices into the requests.
    order: Vec<usize>,
}

impl Run {
    fn setup(&self, isa: Isa, dtype: DType) -> Setup {
        let engine = EngineConfig {
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: Some(self.max_num_batched_tokens),
            max_model_len: Some(LONGEST_REQUEST),
            block_size: self.block_size,
            num_blocks: Some(self.pool_tokens / self.block_size),
            ..Default::default()
        };
        Setup { place: Place::Cpu { isa, threads: self.threads }, dtype, engine }
    }
}

/// Every value of every setting at least once, each block size with each number of seats.
fn runs() -> Vec<Run> {
    let all: Vec<usize> = (0..NUM_REQUESTS).collect();
    let reversed: Vec<usize> = (0..NUM_REQUESTS).rev().collect();
    let some: Vec<usize> = (0..NUM_REQUESTS).step_by(3).collect();
    let run = |sizes: (usize, usize, usize, usize), threads, order: &[usize]| Run {
        max_num_seqs: sizes.0,
        block_size: sizes.1,
        max_num_batched_tokens: sizes.2,
        pool_tokens: sizes.3,
        threads,
        order: order.to_vec(),
    };
    vec![
        run((1, 8, 512, POOL_8), 2, &all),
        run((7, 32, 16, POOL_32), 1, &all),
        run((64, 8, 3, POOL_8), 2, &all),
        run((64, 32, 512, NUM_REQUESTS * POOL_32), 1, &all),
        run((64, 8, 16, POOL_8), 1, &reversed),
        run((7, 8, 512, POOL_8), 2, &reversed),
        run((1, 32, 3, POOL_32), 1, &some),
        run((64, 8, 512, POOL_8), 2, &some),
    ]
}

/// Runs `requests` by `runs` and alone; returns how many sequences were preempted.
fn check(model: &TinyModel, (isa, dtype): (Isa, DType), requests: &[Request], runs: &[Run]) -> u64 {
    let mut preemptions = 0;
    let alone = Setup { place: Place::Cpu { isa, threads: 1 }, ..Setup::cpu(dtype) };
    let oracle: Vec<Fingerprint> =
        requests.iter().map(|r| (&run_alone(model, &alone, r)).into()).collect();
    for (i, run) in runs.iter().enumerate() {
        let mut engine = model.engine(&run.setup(isa, dtype));
        let ordered: Vec<Request> = run.order.iter().map(|&r| requests[r].clone()).collect();
        let outputs = run_all(&mut engine, &ordered);
        for (&request, output) in run.order.iter().zip(&outputs) {
            let got = Fingerprint::from(output);
            assert_eq!(got, oracle[request], "{isa} {dtype}, run {i}, request {request}");
        }
        preemptions += engine.stats().num_preemptions();
        assert_eq!(engine.num_held_blocks(), 0);
    }
    preemptions
}

#[test]
fn every_schedule_gives_the_bits_of_a_request_run_alone() {
    let model = TinyModel::new(1);
    let requests = mixed_requests(NUM_REQUESTS, 2);
    for path in every_path() {
        let preemptions = check(&model, path, &requests, &runs());
        assert!(preemptions > 20, "the pools are too large to preempt: {preemptions}");
    }
}

/// Fewer requests and runs than above: what is new is the arithmetic of products, which is one for
/// all numbers of rows.
#[test]
fn quantised_weights_give_the_bits_of_a_request_run_alone() {
    let requests = mixed_requests(8, 2);
    let all: Vec<usize> = (0..requests.len()).collect();
    let run = |max_num_seqs, max_num_batched_tokens, threads| Run {
        max_num_seqs,
        block_size: 8,
        max_num_batched_tokens,
        threads,
        pool_tokens: POOL_8,
        order: all.clone(),
    };
    let runs = [run(64, 3, 2), run(7, 512, 2)];
    for format in QUANTISED {
        let model = TinyModel::quantised(1, format);
        let mut preemptions = 0;
        for isa in Isa::available() {
            preemptions += check(&model, (isa, DType::Bf16), &requests, &runs);
        }
        preemptions += check(&model, (Isa::detect(), DType::F32), &requests, &runs);
        assert!(preemptions > 0, "the pools are too large to preempt");
    }
}

/// Asserts that logits differ by at most `bound`, and tokens only where two logits are that close.
/// Returns the largest difference.
fn compare_to_reference(got: &RequestOutput, want: &RequestOutput, bound: f32) -> f32 {
    let same = got.token_ids.iter().zip(&want.token_ids).take_while(|(a, b)| a == b).count();
    let comparable = (got.prompt_token_ids.len() + same).min(want.logits.len());
    let mut worst = 0f32;
    for (position, (g, w)) in got.logits.iter().zip(&want.logits).take(comparable).enumerate() {
        for (token, (g, w)) in g.iter().zip(w).enumerate() {
            let difference = (g - w).abs();
            assert!(difference <= bound, "position {position}, token {token}: {g} and {w}");
            worst = worst.max(difference);
        }
    }
    if same < want.token_ids.len() {
        let at = &want.logits[want.prompt_token_ids.len() + same - 1];
        let gap = at[want.token_ids[same] as usize] - at[got.token_ids[same] as usize];
        assert!(gap <= 2.0 * bound, "token {same} differs across a gap of {gap}");
    }
    worst
}

/// Logits of this model are some ±8. In f32 the roundings of 2⁻²⁴ of some hundred sums in a row stay
/// below 10⁻⁴; in bf16 an activation that lands on the other side of a rounding boundary moves by
/// 2⁻⁸ of itself, and a few do in every layer.
#[test]
fn logits_and_greedy_tokens_are_those_of_the_reference() {
    let model = TinyModel::new(1);
    let requests: Vec<Request> = mixed_requests(8, 3)
        .into_iter()
        .map(|r| Request { params: greedy(16), capture_logits: true, ..r })
        .collect();
    for (dtype, bound) in [(DType::F32, 1e-4), (DType::Bf16, 0.1)] {
        let want = run_all(&mut model.engine(&Setup::reference(dtype)), &requests);
        for (isa, _) in every_path().into_iter().filter(|&(_, d)| d == dtype) {
            let setup = Setup { place: Place::Cpu { isa, threads: 2 }, ..Setup::cpu(dtype) };
            let got = run_all(&mut model.engine(&setup), &requests);
            let worst = got
                .iter()
                .zip(&want)
                .map(|(got, want)| compare_to_reference(got, want, bound))
                .fold(0.0, f32::max);
            println!("{isa} {dtype}: logits differ from the reference by at most {worst:e}");
        }
    }
}

/// The reference backend keeps the contract too, which makes it a specification of it.
#[test]
fn the_reference_is_batch_invariant() {
    let model = TinyModel::new(4);
    let requests: Vec<Request> = mixed_requests(12, 5)
        .into_iter()
        .filter(|r| !matches!(&r.prompt, quire_engine::engine::Prompt::Tokens(t) if t.len() > 60))
        .collect();
    for dtype in [DType::F32, DType::Bf16] {
        let setup = Setup::reference(dtype);
        let tight = EngineConfig {
            max_num_batched_tokens: Some(5),
            max_model_len: Some(80),
            block_size: 8,
            num_blocks: Some(10),
            ..Default::default()
        };
        let mut engine = model.engine(&setup.with(tight));
        let outputs = run_all(&mut engine, &requests);
        assert!(engine.stats().num_preemptions() > 0);
        for (request, output) in requests.iter().zip(&outputs) {
            let alone = run_alone(&model, &setup, request);
            assert_eq!(Fingerprint::from(output), Fingerprint::from(&alone));
        }
    }
}
