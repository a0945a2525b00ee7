use super::*;
use crate::sampling::{LogitsContext, LogitsProcessor, ProcessorCall, SeenToken};
use proptest::prelude::*;

fn row() -> SamplingRow {
    SamplingRow { seed: 7, position: 3, ..Default::default() }
}

fn sample_in(logits: &[f32], row: &SamplingRow, batch: &SamplingBatch) -> SampleOutput {
    sample_row(&mut Sampler::new(Isa::Portable), &mut logits.to_vec(), row, batch)
}

fn sample(logits: &[f32], row: &SamplingRow) -> SampleOutput {
    sample_in(logits, row, &SamplingBatch::default())
}

/// Relative to the maximum, over the temperature.
fn scaled(logits: &[f32], temperature: f32) -> Vec<f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().map(|x| (x - max) / temperature).collect()
}

/// The tokens that can be drawn, by definition: a full sort in f64.
fn allowed_by_sort(logits: &[f32], row: &SamplingRow) -> Vec<u32> {
    let scaled = scaled(logits, row.temperature);
    let p = |i: u32| f64::from(vecmath::exp(scaled[i as usize]));
    let mut ids: Vec<u32> = (0..logits.len() as u32)
        .filter(|&i| p(i) as f32 >= row.min_p && logits[i as usize] > f32::NEG_INFINITY)
        .collect();
    ids.sort_by(|&a, &b| scaled[b as usize].total_cmp(&scaled[a as usize]));
    let with_ties = |ids: &mut Vec<u32>, n: usize| {
        let last = scaled[ids[n - 1] as usize];
        ids.retain(|&i| scaled[i as usize] >= last);
    };
    if row.top_k > 0 && (row.top_k as usize) < ids.len() {
        with_ties(&mut ids, row.top_k as usize);
    }
    if row.top_p < 1.0 {
        let total: f64 = ids.iter().map(|&i| p(i)).sum();
        let mut mass = 0.0;
        let n = ids.iter().position(|&i| {
            mass += p(i);
            mass >= f64::from(row.top_p) * total * (1.0 - 1e-9)
        });
        let n = n.map_or(ids.len(), |n| n + 1);
        with_ties(&mut ids, n);
    }
    ids.sort_unstable();
    ids
}

proptest! {
    #[test]
    fn filters_equal_the_sort(
        // Multiples of a quarter, so that ties happen.
        logits in prop::collection::vec((-24i32..24).prop_map(|x| x as f32 * 0.25), 1..80),
        top_k in 0u32..90,
        top_p in prop::sample::select(vec![1.0f32, 0.9, 0.5, 0.1, 1e-6]),
        min_p in prop::sample::select(vec![0.0f32, 0.05, 0.5, 1.0]),
        temperature in prop::sample::select(vec![0.5f32, 1.0, 2.0]),
    ) {
        let row = SamplingRow { top_k, top_p, min_p, temperature, ..row() };
        let scaled = scaled(&logits, temperature);
        let mut sampler = Sampler::new(Isa::Portable);
        sampler.filter(&scaled, &row);
        prop_assert_eq!(&sampler.ids, &allowed_by_sort(&logits, &row));
        let token = sample(&logits, &row).token.unwrap();
        prop_assert!(sampler.ids.contains(&token));
    }

    /// Large vocabularies take the bounds; few levels make ties, many make long tails.
    #[test]
    fn filters_equal_the_sort_over_a_large_vocabulary(
        seed in 1u64..1000,
        levels in prop::sample::select(vec![7u64, 500, 1 << 20]),
        scale in prop::sample::select(vec![0.5f32, 4.0, 20.0]),
        top_k in prop::sample::select(vec![0u32, 1, 5, 20, 40]),
        top_p in prop::sample::select(vec![1.0f32, 0.95, 0.5, 0.05]),
        min_p in prop::sample::select(vec![0.0f32, 0.02]),
    ) {
        let mut state = seed;
        let mut logits: Vec<f32> = (0..6000).map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) % levels) as f32 / levels as f32 * scale
        }).collect();
        logits[17] = f32::NEG_INFINITY;
        let row = SamplingRow { top_k, top_p, min_p, ..row() };
        let mut sampler = Sampler::new(Isa::detect());
        sampler.filter(&scaled(&logits, 1.0), &row);
        prop_assert_eq!(&sampler.ids, &allowed_by_sort(&logits, &row));
    }

    #[test]
    fn every_isa_draws_the_same(
        logits in prop::collection::vec(-20f32..20.0, 1..300),
        seed in any::<u64>(),
        top_p in prop::sample::select(vec![1.0f32, 0.8]),
    ) {
        let row = SamplingRow { seed, top_p, logprobs: Some(3), ..row() };
        let expected = sample(&logits, &row);
        for isa in Isa::available() {
            let got = sample_row(
                &mut Sampler::new(isa), &mut logits.clone(), &row, &SamplingBatch::default());
            prop_assert_eq!(&got, &expected);
        }
    }
}

/// χ² of 20,000 draws against the softmax; 99.9 % quantile for 5 degrees of freedom is 20.5.
#[test]
fn draws_follow_the_softmax() {
    let logits = [0.0f32, 1.0, -1.0, 2.0, 0.5, -3.0];
    let temperature = 0.8f32;
    let exps: Vec<f64> = logits.iter().map(|x| f64::from(x / temperature).exp()).collect();
    let total: f64 = exps.iter().sum();
    let n = 20_000;
    let mut counts = [0f64; 6];
    for position in 0..n {
        let row = SamplingRow { position, temperature, ..row() };
        counts[sample(&logits, &row).token.unwrap() as usize] += 1.0;
    }
    let chi2: f64 = exps
        .iter()
        .zip(counts)
        .map(|(e, c)| {
            let expected = e / total * f64::from(n);
            (c - expected).powi(2) / expected
        })
        .sum();
    assert!(chi2 < 20.5, "chi² {chi2}, counts {counts:?}");
}

#[test]
fn greedy_takes_the_first_of_equal_maxima() {
    let row = SamplingRow { temperature: 0.0, ..row() };
    assert_eq!(sample(&[1.0, 3.0, 3.0, 2.0], &row).token, Ok(1));
}

/// vLLM #3063: a tiny temperature must not overflow to token 0.
#[test]
fn a19_tiny_temperature_is_argmax() {
    let params = crate::SamplingParams { temperature: 1e-5, ..Default::default() };
    let row = SamplingRow { temperature: params.effective_temperature(), ..row() };
    assert_eq!(row.temperature, 0.01);
    assert_eq!(sample(&[-60000.0, 10.0, 30.0], &row).token, Ok(2));
}

#[test]
fn a_nan_row_fails_and_nothing_allowed_fails() {
    assert_eq!(sample(&[0.0, f32::NAN], &row()).token, Err(RowError::NotANumber));
    assert_eq!(sample(&[0.0, f32::INFINITY], &row()).token, Err(RowError::NotANumber));
    let batch = SamplingBatch { ids: vec![0, 1], ..Default::default() };
    let all = sample_in(&[1.0, 2.0], &SamplingRow { suppressed: 0..2, ..row() }, &batch);
    assert_eq!(all.token, Err(RowError::NothingAllowed));
}

#[test]
fn suppressed_ids_are_never_sampled_but_keep_their_logprob() {
    let batch = SamplingBatch { ids: vec![1, 99], ..Default::default() };
    let row = SamplingRow { temperature: 0.0, logprobs: Some(2), suppressed: 0..2, ..row() };
    let out = sample_in(&[1.0, 5.0, 4.0], &row, &batch);
    assert_eq!(out.token, Ok(2));
    let logprobs = out.logprobs.unwrap();
    assert_eq!(logprobs.top.iter().map(|t| t.token).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(logprobs.sampled, logprobs.top[1]);
}

#[test]
fn logprobs_are_those_of_the_raw_softmax() {
    let logits = [0.5f32, -1.0, 2.0, 2.0];
    let row = SamplingRow { temperature: 3.0, logprobs: Some(4), ..row() };
    let out = sample(&logits, &row).logprobs.unwrap();
    assert_eq!(out.top.iter().map(|t| t.token).collect::<Vec<_>>(), [2, 3, 0, 1]);
    let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
    for t in out.top {
        let expected = f64::from(logits[t.token as usize]) - total.ln();
        assert!((f64::from(t.logprob) - expected).abs() < 1e-6, "{t:?} {expected}");
    }
}

fn greedy() -> SamplingRow {
    SamplingRow { temperature: 0.0, ..row() }
}

#[test]
fn allowed_ids_exclude_all_others_before_everything_else() {
    let batch = SamplingBatch { ids: vec![1, 3, 3], ..Default::default() };
    let row = SamplingRow { allowed: Some(0..2), ..greedy() };
    assert_eq!(sample_in(&[9.0, 1.0, 8.0, 2.0], &row, &batch).token, Ok(3));
    let both = SamplingRow { allowed: Some(0..2), suppressed: 2..3, ..greedy() };
    assert_eq!(sample_in(&[9.0, 1.0, 8.0, 2.0], &both, &batch).token, Ok(1));
}

#[test]
fn bias_is_added_before_penalties() {
    // 1.0 + 3.0 = 4.0, halved by the repetition penalty to 2.0: still below 3.0.
    let batch = SamplingBatch {
        biases: vec![(0, 3.0)],
        seen: vec![SeenToken { token: 0, output_count: 1 }],
        ..Default::default()
    };
    let biased = SamplingRow { bias: 0..1, ..greedy() };
    assert_eq!(sample_in(&[1.0, 3.0], &biased, &batch).token, Ok(0));
    let penalised = SamplingRow { seen: 0..1, repetition_penalty: 2.0, ..biased };
    assert_eq!(sample_in(&[1.0, 3.0], &penalised, &batch).token, Ok(1));
}

/// vllm-metal PR#69: repetition counts prompt and output, once a token; presence and frequency
/// the output only. Prompt "a a b", output "b b".
#[test]
fn a21_penalties_tell_prompt_from_output() {
    let seen =
        vec![SeenToken { token: 0, output_count: 0 }, SeenToken { token: 1, output_count: 2 }];
    let batch = SamplingBatch { seen, ..Default::default() };
    let row = SamplingRow { seen: 0..2, ..row() };
    let after = |row: &SamplingRow| {
        let mut logits = [4.0f32, 4.0, -4.0, 4.0];
        processors::process(&mut logits, row, &batch).unwrap();
        logits
    };
    let repetition = SamplingRow { repetition_penalty: 2.0, ..row.clone() };
    assert_eq!(after(&repetition), [2.0, 2.0, -4.0, 4.0]);
    let presence = SamplingRow { presence_penalty: 1.0, ..row.clone() };
    assert_eq!(after(&presence), [4.0, 3.0, -4.0, 4.0]);
    let frequency = SamplingRow { frequency_penalty: 1.0, ..row };
    assert_eq!(after(&frequency), [4.0, 2.0, -4.0, 4.0]);
}

#[test]
fn a_repetition_penalty_lowers_negative_logits_too() {
    let seen = vec![SeenToken { token: 0, output_count: 1 }];
    let batch = SamplingBatch { seen, ..Default::default() };
    let row = SamplingRow { seen: 0..1, repetition_penalty: 2.0, ..greedy() };
    assert_eq!(sample_in(&[-1.0, -1.5], &row, &batch).token, Ok(1));
}

struct Forbid(usize);

impl LogitsProcessor for Forbid {
    fn process(&self, context: &LogitsContext<'_>, logits: &mut [f32]) {
        assert_eq!((context.prompt, context.output), (&[7, 8][..], &[9][..]));
        logits[self.0] = f32::NEG_INFINITY;
    }
}

#[test]
fn a_custom_processor_sees_the_sequence_and_a_panic_in_it_fails_the_row() {
    let call = |processor: Forbid, history| ProcessorCall {
        processor: std::sync::Arc::new(processor),
        history,
        prompt_len: 2,
    };
    let batch = SamplingBatch { history: vec![0, 7, 8, 9], ..Default::default() };
    let row = SamplingRow { processor: Some(call(Forbid(1), 1..4)), ..greedy() };
    assert_eq!(sample_in(&[1.0, 3.0, 2.0], &row, &batch).token, Ok(2));
    let out_of_range = SamplingRow { processor: Some(call(Forbid(99), 1..4)), ..greedy() };
    let failed = sample_in(&[1.0, 3.0, 2.0], &out_of_range, &batch).token;
    assert_eq!(failed, Err(RowError::ProcessorPanicked));
}

#[test]
fn a_given_token_has_its_logprob_and_nothing_is_sampled() {
    let row = SamplingRow { target: RowTarget::Given(1), logprobs: Some(1), ..row() };
    let out = sample(&[2.0, 1.0], &row);
    let logprobs = out.logprobs.unwrap();
    assert_eq!((out.token, logprobs.sampled.token, logprobs.top[0].token), (Ok(1), 1, 0));
    assert!((logprobs.sampled.logprob - -1.313_261_7).abs() < 1e-6, "{logprobs:?}");
}

#[test]
fn all_logprobs_are_the_whole_vocabulary_in_order() {
    let logits: Vec<f32> = (0..300).map(|i| ((i * 7919) % 101) as f32).collect();
    let all = sample(&logits, &SamplingRow { logprobs: Some(300), ..row() }).logprobs.unwrap().top;
    let few = sample(&logits, &SamplingRow { logprobs: Some(20), ..row() }).logprobs.unwrap().top;
    assert_eq!(all.len(), 300);
    assert_eq!(all[..20], few[..]);
}

/// Large logits over a small temperature: only differences count, so nothing overflows.
#[test]
fn no_finite_logits_overflow() {
    let logits = [3.0e38f32, 2.9e38, -3.0e38, 1.0];
    for row in [
        SamplingRow { top_p: 0.9, ..row() },
        SamplingRow { top_k: 2, ..row() },
        SamplingRow { min_p: 0.1, ..row() },
        row(),
    ] {
        let row = SamplingRow { temperature: 0.01, ..row };
        assert_eq!(sample(&logits, &row).token, Ok(0), "{row:?}");
    }
}

/// Few candidates and many take different ways to the same token.
#[test]
fn sparse_and_dense_draws_agree() {
    let logits: Vec<f32> = (0..640).map(|i| ((i * 7919) % 101) as f32 * 0.01).collect();
    for position in 0..200 {
        let few = SamplingRow { top_k: 15, position, ..row() };
        let token = sample(&logits, &few).token.unwrap();
        let mut masked = logits.clone();
        let mut best: Vec<u32> = (0..640).collect();
        best.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
        let least = logits[best[14] as usize];
        masked.iter_mut().filter(|x| **x < least).for_each(|x| *x = f32::NEG_INFINITY);
        assert_eq!(sample(&masked, &SamplingRow { position, ..row() }).token, Ok(token));
    }
}

#[test]
fn extreme_penalties_end_at_the_range_of_floats() {
    let seen =
        vec![SeenToken { token: 0, output_count: 1 }, SeenToken { token: 1, output_count: 1 }];
    let batch = SamplingBatch { seen, ..Default::default() };
    for (repetition_penalty, expected) in [(1e-40, 0), (3e38, 2)] {
        let row = SamplingRow { seen: 0..2, repetition_penalty, ..greedy() };
        assert_eq!(sample_in(&[5.0, -5.0, 0.1], &row, &batch).token, Ok(expected));
    }
    let all = SamplingRow { seen: 0..2, repetition_penalty: 3e38, ..greedy() };
    assert!(sample_in(&[-5.0, -6.0], &all, &batch).token.is_ok());
}
