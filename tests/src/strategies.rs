//! What random tests draw from: op shapes, ragged batches with shuffled blocks, request mixes.

use crate::conformance::{AttentionCase, GemmCase};
use crate::oracle::greedy;
use crate::rng::Rng;
use proptest::prelude::*;
use proptest::sample::select;
use quire_engine::sampling::NumLogprobs;
use quire_engine::{Request, SamplingParams};

/// A matrix product of odd and even sizes around the kernels' tile and panel widths.
pub fn gemm() -> impl Strategy<Value = GemmCase> {
    let n = prop_oneof![1..20usize, 60..70usize, 120..140usize];
    let k = prop_oneof![1..20usize, 60..70usize, 250..300usize];
    gemm_of(n, k)
}

/// The same with outputs and inputs from these.
pub fn gemm_of(
    n: impl Strategy<Value = usize>,
    k: impl Strategy<Value = usize>,
) -> impl Strategy<Value = GemmCase> {
    (1..20usize, n, k, any::<bool>(), any::<u64>()).prop_map(|(rows, n, k, bias, seed)| GemmCase {
        rows,
        n,
        k,
        bias,
        seed,
    })
}

/// Ragged sequences in chunks; at most one of them is longer than a split of 256 positions.
fn chunks() -> impl Strategy<Value = Vec<Vec<usize>>> {
    let short = prop::collection::vec(prop_oneof![Just(1usize), 1..12usize], 1..4);
    let long = (180..256usize).prop_map(|n| vec![n / 2, n - n / 2, 60, 1]);
    (prop::collection::vec(short, 1..4), prop::option::weighted(0.25, long)).prop_map(
        |(mut seqs, long)| {
            seqs.extend(long);
            seqs
        },
    )
}

/// Attention over every head layout, head dimension, block size and kind of window.
pub fn attention() -> impl Strategy<Value = AttentionCase> {
    attention_of(&[16, 64, 80, 96, 128, 256])
}

/// The same with heads of these dimensions.
pub fn attention_of(head_dims: &[usize]) -> impl Strategy<Value = AttentionCase> + use<> {
    let heads = (select(vec![1usize, 2, 3]), select(vec![1usize, 3, 4, 7, 8]));
    let head = (heads, select(head_dims.to_vec()))
        .prop_filter("few enough heads to read back", |((kv, group), d)| kv * group * d <= 768);
    let window = prop::option::of(prop_oneof![1..12u32, 200..300u32]);
    let options = (select(vec![8usize, 16, 32, 64, 256]), window, any::<bool>(), any::<bool>());
    (head, options, select(vec![2usize, 1]), chunks(), any::<u64>()).prop_map(
        |(head, options, rotated, seqs, seed)| {
            let ((num_kv_heads, group), head_dim) = head;
            let (block_size, window, interleaved, qk_norm) = options;
            // One long sequence of many heads would spend the time of all other cases.
            let wide = num_kv_heads * group * head_dim > 256;
            let seqs = match seqs.len() {
                n if n > 1 && wide => seqs[..n - 1].to_vec(),
                _ => seqs,
            };
            AttentionCase {
                num_kv_heads,
                group,
                head_dim,
                block_size,
                window,
                rot_dim: head_dim / rotated,
                interleaved,
                qk_norm,
                seqs,
                seed,
                block_seed: !seed,
            }
        },
    )
}

/// Tokens of prompt and output that none of [`mixed_requests`] exceeds.
pub const LONGEST_REQUEST: usize = 289 + 48;

/// `n` requests of every kind, all with seeds of their own: greedy and drawn, filtered in each
/// way, with logprobs, stop strings, stop ids and `min_tokens`. The prompts are random bytes,
/// mostly short; every 16th crosses a split of 256 positions. At most
/// [`LONGEST_REQUEST`] tokens with their output.
pub fn mixed_requests(n: usize, seed: u64) -> Vec<Request> {
    (0..n).map(|i| mixed_request(i, &mut Rng::named(seed, &format!("request {i}")))).collect()
}

const TOP_1: Option<NumLogprobs> = Some(NumLogprobs::Top(1));

fn mixed_request(i: usize, rng: &mut Rng) -> Request {
    let len = match i % 16 {
        5 => 250 + rng.below(40),
        0 => 1,
        _ => 2 + rng.below(24),
    };
    let prompt: Vec<u32> = (0..len).map(|_| rng.below(256) as u32).collect();
    let base = SamplingParams {
        seed: Some(rng.next_u64()),
        temperature: 0.7,
        ignore_eos: i.is_multiple_of(3),
        logprobs: i.is_multiple_of(2).then_some(NumLogprobs::Top(3)),
        ..greedy(1 + rng.below(48))
    };
    let word = |text: &str| vec![text.to_owned()];
    let params = match i % 16 {
        0 => SamplingParams { temperature: 0.0, ..base },
        1 => SamplingParams { temperature: 1.5, ..base },
        2 => SamplingParams { top_k: 5, ..base },
        3 => SamplingParams { top_p: 0.8, ..base },
        4 => SamplingParams { min_p: 0.1, top_k: 40, ..base },
        5 => SamplingParams { temperature: 0.0, min_tokens: 1, ..base },
        7 => SamplingParams { repetition_penalty: 1.3, prompt_logprobs: TOP_1, ..base },
        8 => SamplingParams { presence_penalty: 1.5, frequency_penalty: -0.5, ..base },
        9 => SamplingParams { logit_bias: vec![(101, 4.0), (32, -100.0)], ..base },
        10 => SamplingParams { allowed_token_ids: Some((97..123).collect()), ..base },
        11 => SamplingParams { bad_words: word("e"), temperature: 0.0, ..base },
        12 => SamplingParams { frequency_penalty: 2.0, temperature: 0.0, ..base },
        13 => SamplingParams { prompt_logprobs: TOP_1, temperature: 0.0, ..base },
        6 => SamplingParams { stop: ["e", "ab", "\u{FFFD}"].map(str::to_owned).into(), ..base },
        _ => SamplingParams { stop_token_ids: (0..40).collect(), ..base },
    };
    Request { stream: i.is_multiple_of(5), ..Request::new(prompt, params) }
}

/// Tokens of prompt and output that no [`any_request`] exceeds.
pub const LONGEST_ANY_REQUEST: usize = 24 + 12;

/// A request with every parameter drawn anew, each at its default about half of the time.
/// `processors` are names that the engine knows. At most [`LONGEST_ANY_REQUEST`] tokens.
pub fn any_request(rng: &mut Rng, processors: &[&str]) -> Request {
    let len = 1 + rng.below(24);
    let prompt: Vec<u32> = (0..len).map(|_| rng.below(256) as u32).collect();
    let mut params = SamplingParams {
        max_tokens: Some(1 + rng.below(12)),
        temperature: [0.0, 0.5, 1.0, 3.0][rng.below(4)],
        ignore_eos: coin(rng),
        include_stop_str_in_output: coin(rng),
        skip_special_tokens: coin(rng),
        detokenize: rng.below(8) > 0,
        seed: coin(rng).then(|| rng.next_u64()),
        ..Default::default()
    };
    any_numbers(rng, &mut params);
    any_lists(rng, &mut params);
    if coin(rng) {
        params.logits_processor = Some(processors[rng.below(processors.len())].to_owned());
    }
    let (stream, capture_logits) = (coin(rng), coin(rng));
    Request { stream, capture_logits, ..Request::new(prompt, params) }
}

fn coin(rng: &mut Rng) -> bool {
    rng.below(2) == 0
}

fn any_numbers(rng: &mut Rng, params: &mut SamplingParams) {
    if !params.is_greedy() {
        params.n = 1 + rng.below(3);
    }
    if coin(rng) {
        params.min_tokens = rng.below(params.max_tokens.unwrap_or(1) + 1);
    }
    if coin(rng) {
        (params.top_k, params.min_p) = (rng.below(400) as u32, rng.below(3) as f32 * 0.1);
    }
    if coin(rng) {
        params.top_p = (1 + rng.below(10)) as f32 * 0.1;
    }
    if coin(rng) {
        params.presence_penalty = rng.signed() * 2.0;
        params.frequency_penalty = rng.signed() * 2.0;
    }
    if coin(rng) {
        params.repetition_penalty = 1.0 + rng.signed() * 0.5;
    }
    let mut logprobs = || coin(rng).then(|| NumLogprobs::Top(rng.below(6) as u32));
    (params.logprobs, params.prompt_logprobs) = (logprobs(), logprobs());
}

fn any_lists(rng: &mut Rng, params: &mut SamplingParams) {
    let letters = |rng: &mut Rng| -> Vec<String> {
        let word = |rng: &mut Rng| (0..1 + rng.below(2)).map(|_| letter(rng)).collect();
        (0..1 + rng.below(3)).map(|_| word(rng)).collect()
    };
    if coin(rng) {
        params.bad_words = letters(rng);
    }
    if coin(rng) && params.detokenize {
        params.stop = letters(rng);
    }
    let ids =
        |rng: &mut Rng, n: usize| -> Vec<u32> { (0..n).map(|_| rng.below(256) as u32).collect() };
    if coin(rng) {
        params.stop_token_ids = ids(rng, 20);
    }
    if coin(rng) {
        params.allowed_token_ids = Some(ids(rng, 60));
    }
    if coin(rng) {
        let bias = |id| (id, rng.signed() * 20.0);
        params.logit_bias = (0..256).step_by(5).map(bias).collect();
    }
}

fn letter(rng: &mut Rng) -> char {
    char::from(b'a' + rng.below(26) as u8)
}
