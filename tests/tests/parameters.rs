//! Every sampling parameter at its default, its edges and just outside; the texts of the errors
//! are kept in a snapshot. (Wrong JSON types are tested where JSON is read, in `server`.)

use quire_engine::SamplingParams;
use quire_engine::sampling::{
    EarlyStopping, MAX_BAD_WORD_BYTES, MAX_BAD_WORDS, MAX_BEAM_STOP_IDS, MAX_BEAM_WIDTH,
    MAX_CACHE_SALT_BYTES, MAX_N, NumLogprobs, ParamLimits,
};
use quire_engine::text::{MAX_STOP_BYTES, MAX_STOP_STRINGS};
use std::fmt::Write;

const LIMITS: ParamLimits = ParamLimits { vocab_size: 100, max_logprobs: 20 };

fn with(change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    let mut params = SamplingParams::default();
    change(&mut params);
    params
}

fn floats(
    set: fn(&mut SamplingParams, f32),
    good: &[f32],
    bad: &[f32],
) -> (Vec<SamplingParams>, Vec<SamplingParams>) {
    let all = |values: &[f32]| values.iter().map(|&x| with(|p| set(p, x))).collect();
    (all(good), all(bad))
}

type Cases = Vec<(&'static str, (Vec<SamplingParams>, Vec<SamplingParams>))>;

fn numbers() -> Cases {
    let nan = f32::NAN;
    let inf = f32::INFINITY;
    vec![
        ("temperature", floats(|p, x| p.temperature = x, &[0.0, 1e-9, 1e30], &[-0.1, nan, inf])),
        ("top_p", floats(|p, x| p.top_p = x, &[1e-9, 1.0], &[0.0, -0.1, 1.01, nan])),
        ("min_p", floats(|p, x| p.min_p = x, &[0.0, 1.0], &[-0.01, 1.01, nan])),
        (
            "presence_penalty",
            floats(|p, x| p.presence_penalty = x, &[-2.0, 2.0], &[-2.1, 2.1, nan]),
        ),
        (
            "frequency_penalty",
            floats(|p, x| p.frequency_penalty = x, &[-2.0, 2.0], &[-2.1, 2.1, nan]),
        ),
        (
            "repetition_penalty",
            floats(|p, x| p.repetition_penalty = x, &[1e-9, 1.0, 1e9], &[0.0, -1.0, inf, nan]),
        ),
        (
            "top_p with temperature 0",
            (
                vec![with(|p| (p.top_p, p.temperature) = (0.0, 0.0))],
                vec![with(|p| (p.top_p, p.temperature) = (-0.1, 0.0))],
            ),
        ),
        ("top_k", (vec![with(|p| p.top_k = 0), with(|p| p.top_k = u32::MAX)], vec![])),
        ("seed", (vec![with(|p| p.seed = Some(0)), with(|p| p.seed = Some(u64::MAX))], vec![])),
        (
            "priority",
            (vec![with(|p| p.priority = i32::MIN), with(|p| p.priority = i32::MAX)], vec![]),
        ),
    ]
}

fn counts() -> Cases {
    let logprobs = |n| with(|p: &mut SamplingParams| p.logprobs = Some(n));
    let prompt_logprobs = |n| with(|p: &mut SamplingParams| p.prompt_logprobs = Some(n));
    let n = |n, temperature| with(|p| (p.n, p.temperature) = (n, temperature));
    vec![
        ("n", (vec![n(1, 0.0), n(MAX_N, 1.0)], vec![n(0, 1.0), n(MAX_N + 1, 1.0), n(2, 0.0)])),
        (
            "max_tokens",
            (
                vec![with(|p| p.max_tokens = Some(1)), with(|p| p.max_tokens = None)],
                vec![with(|p| p.max_tokens = Some(0))],
            ),
        ),
        ("min_tokens", (vec![with(|p| p.min_tokens = 16)], vec![with(|p| p.min_tokens = 17)])),
        (
            "logprobs",
            (
                vec![logprobs(NumLogprobs::Top(0)), logprobs(NumLogprobs::Top(20))],
                vec![logprobs(NumLogprobs::Top(21)), logprobs(NumLogprobs::All)],
            ),
        ),
        (
            "prompt_logprobs",
            (
                vec![prompt_logprobs(NumLogprobs::Top(20))],
                vec![
                    prompt_logprobs(NumLogprobs::Top(1_000_000)),
                    prompt_logprobs(NumLogprobs::All),
                ],
            ),
        ),
    ]
}

fn lists() -> Cases {
    let stops = |n: usize, bytes: usize| with(|p| p.stop = vec!["a".repeat(bytes); n]);
    let words = |n: usize, bytes: usize| with(|p| p.bad_words = vec!["a".repeat(bytes); n]);
    let stop_ids = |ids: Vec<u32>| with(|p| p.stop_token_ids = ids);
    let allowed = |ids: Vec<u32>| with(|p| p.allowed_token_ids = Some(ids));
    let bias = |id, x| with(|p| p.logit_bias = vec![(id, x)]);
    vec![
        (
            "stop",
            (
                vec![stops(MAX_STOP_STRINGS, 1), stops(1, MAX_STOP_BYTES)],
                vec![
                    stops(MAX_STOP_STRINGS + 1, 1),
                    stops(2, MAX_STOP_BYTES / 2 + 1),
                    stops(1, 0),
                    with(|p| (p.stop, p.detokenize) = (vec!["a".into()], false)),
                ],
            ),
        ),
        (
            "bad_words",
            (
                vec![words(MAX_BAD_WORDS, 1), words(1, MAX_BAD_WORD_BYTES)],
                vec![
                    words(MAX_BAD_WORDS + 1, 1),
                    words(1, MAX_BAD_WORD_BYTES + 1),
                    with(|p| p.bad_words = vec![" ".into()]),
                ],
            ),
        ),
        (
            "stop_token_ids",
            (vec![stop_ids(vec![0, 99])], vec![stop_ids(vec![100]), stop_ids(vec![1; 101])]),
        ),
        ("allowed_token_ids", (vec![allowed(vec![99])], vec![allowed(vec![]), allowed(vec![100])])),
        (
            "logit_bias",
            (
                vec![bias(99, 1e9), bias(0, f32::NEG_INFINITY)],
                vec![bias(100, 1.0), bias(5, f32::NAN)],
            ),
        ),
    ]
}

fn salts() -> Cases {
    let salt = |bytes: usize| with(|p| p.cache_salt = Some("a".repeat(bytes)));
    let (good, bad) = (vec![salt(1), salt(MAX_CACHE_SALT_BYTES)], [0, MAX_CACHE_SALT_BYTES + 1]);
    vec![("cache_salt", (good, bad.map(salt).into()))]
}

/// A search with 4 beams.
fn beams(change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    with(|p| {
        (p.temperature, p.use_beam_search, p.beam_width) = (0.0, true, Some(4));
        change(p);
    })
}

fn beam_numbers() -> Cases {
    let sizes = |n, width| beams(|p| (p.n, p.beam_width) = (n, width));
    let penalty = |x| beams(|p| p.length_penalty = x);
    let (most, f) = (MAX_BEAM_WIDTH, f32::MAX);
    vec![
        (
            "beam_width",
            (
                vec![sizes(1, Some(1)), sizes(2, None), sizes(3, Some(3)), sizes(2, Some(most))],
                vec![
                    sizes(3, Some(2)),
                    sizes(1, Some(0)),
                    sizes(1, Some(most + 1)),
                    with(|p| p.beam_width = Some(1)),
                ],
            ),
        ),
        ("n with beams", (vec![sizes(most, None)], vec![sizes(most + 1, None)])),
        (
            "length_penalty",
            (
                vec![penalty(0.0), penalty(-f), penalty(f)],
                vec![
                    penalty(f32::NAN),
                    penalty(f32::NEG_INFINITY),
                    with(|p| p.length_penalty = 0.5),
                ],
            ),
        ),
        (
            "early_stopping",
            (
                [EarlyStopping::Heuristic, EarlyStopping::Always, EarlyStopping::Never]
                    .map(|mode| beams(|p| p.early_stopping = mode))
                    .into(),
                [EarlyStopping::Always, EarlyStopping::Never]
                    .map(|mode| with(|p| p.early_stopping = mode))
                    .into(),
            ),
        ),
        (
            "temperature with beams",
            (
                vec![beams(|p| (p.temperature, p.top_k, p.top_p) = (1e-6, 5, 0.5))],
                vec![beams(|p| p.temperature = 1.0)],
            ),
        ),
    ]
}

/// What would change the probabilities that beams are compared by, or has no meaning for a beam.
fn refused_with_beams() -> Cases {
    let words = || vec!["a".to_owned()];
    let top = Some(NumLogprobs::Top(1));
    let ids = |n| beams(|p| p.stop_token_ids = vec![1; n]);
    let stop_ids = (vec![ids(MAX_BEAM_STOP_IDS)], vec![ids(MAX_BEAM_STOP_IDS + 1)]);
    let mut cases: Cases = [
        ("presence_penalty", beams(|p| p.presence_penalty = 0.1)),
        ("frequency_penalty", beams(|p| p.frequency_penalty = -0.1)),
        ("repetition_penalty", beams(|p| p.repetition_penalty = 1.1)),
        ("min_tokens", beams(|p| p.min_tokens = 1)),
        ("logit_bias", beams(|p| p.logit_bias = vec![(1, 0.5)])),
        ("bad_words", beams(|p| p.bad_words = words())),
        ("allowed_token_ids", beams(|p| p.allowed_token_ids = Some(vec![1]))),
        ("logits_processor", beams(|p| p.logits_processor = Some("rule".to_owned()))),
        ("stop", beams(|p| p.stop = words())),
        ("logprobs", beams(|p| p.logprobs = top)),
        ("prompt_logprobs", beams(|p| p.prompt_logprobs = top)),
    ]
    .map(|(field, bad)| (field, (vec![], vec![bad])))
    .into();
    cases.push(("stop_token_ids", stop_ids));
    cases
}

#[test]
fn every_parameter_at_its_edges() {
    SamplingParams::default().validate(&LIMITS).unwrap();
    let mut errors = String::new();
    let all = [numbers(), counts(), lists(), salts(), beam_numbers(), refused_with_beams()];
    for (name, (good, bad)) in all.into_iter().flatten() {
        for params in good {
            assert_eq!(params.validate(&LIMITS), Ok(()), "{name}: {params:?}");
        }
        for params in bad {
            let error = params.validate(&LIMITS).unwrap_err();
            assert!(name.starts_with(error.field), "{name}: {error}");
            writeln!(errors, "{error}").unwrap();
        }
    }
    insta::assert_snapshot!(errors);
}

#[test]
fn all_logprobs_are_allowed_where_the_engine_allows_the_vocabulary() {
    let wide = ParamLimits { max_logprobs: 100, ..LIMITS };
    assert_eq!(with(|p| p.logprobs = Some(NumLogprobs::All)).validate(&wide), Ok(()));
    assert_eq!(NumLogprobs::All.resolve(100), 100);
    assert_eq!(NumLogprobs::Top(1000).resolve(100), 100);
}
