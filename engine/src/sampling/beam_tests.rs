use super::*;

/// A language of `vocab` tokens: the log-probabilities after any tokens, the same at each call.
#[derive(Clone, Copy, Debug)]
struct Toy {
    vocab: u32,
    seed: u64,
}

impl Toy {
    fn logprobs(self, tokens: &[u32]) -> Vec<f32> {
        let mut state = self.seed;
        let mut mix = |value: u64| {
            state = (state ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            state ^= state >> 29;
            state
        };
        for &token in tokens {
            mix(u64::from(token) + 1);
        }
        let logit = |id| (mix(u64::from(id) + 1000) >> 40) as f32 / (1 << 23) as f32 * 3.0;
        let logits: Vec<f32> = (0..self.vocab).map(logit).collect();
        let sum: f32 = logits.iter().map(|x| x.exp()).sum();
        logits.iter().map(|x| x - sum.ln()).collect()
    }

    /// The `n` best tokens, best first.
    fn best(self, tokens: &[u32], n: usize) -> Vec<TokenLogprob> {
        let all = self.logprobs(tokens).into_iter().zip(0..);
        let mut all: Vec<_> = all.map(|(logprob, token)| TokenLogprob { token, logprob }).collect();
        all.sort_by(|a, b| b.logprob.total_cmp(&a.logprob).then(a.token.cmp(&b.token)));
        all.truncate(n);
        all
    }
}

fn params(width: usize, max_tokens: usize, stop_token_ids: &[u32]) -> BeamParams {
    BeamParams {
        width,
        length_penalty: 1.0,
        early_stopping: EarlyStopping::Heuristic,
        max_tokens,
        stop_token_ids: stop_token_ids.into(),
    }
}

fn list(candidates: &[(u32, f32)]) -> Vec<TokenLogprob> {
    candidates.iter().map(|&(token, logprob)| TokenLogprob { token, logprob }).collect()
}

fn extensions(all: &[(usize, u32)]) -> BeamStep {
    let extension = |&(parent, token)| BeamExtension { parent, token };
    BeamStep::Continue(all.iter().map(extension).collect())
}

/// Runs a search to its end; the finished sequences and the steps it took.
fn run(toy: Toy, params: &BeamParams) -> (Vec<Hypothesis>, usize) {
    let mut search = BeamSearch::new(params.clone());
    let mut beams: Vec<Vec<u32>> = vec![vec![]];
    for steps in 1.. {
        let n = search.candidates_per_beam();
        let candidates: Vec<_> = beams.iter().map(|beam| toy.best(beam, n)).collect();
        match search.advance(&candidates).expect("numbers") {
            BeamStep::Done => return (search.into_hypotheses(params.width), steps),
            BeamStep::Continue(next) => {
                assert!(next.len() <= params.width);
                beams = next.iter().map(|e| [&beams[e.parent][..], &[e.token]].concat()).collect();
            }
        }
    }
    unreachable!()
}

/// Sequences with their sums, and where they are finished whether a stop token ends them.
type Sums = Vec<(Vec<u32>, f64)>;

fn score(params: &BeamParams, sum: f64, len: usize) -> f64 {
    sum / (len as f64).powf(params.length_penalty.into())
}

fn by_sum(all: &mut Sums) {
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
}

/// The definition with whole sequences and whole vocabularies.
fn naive(toy: Toy, params: &BeamParams) -> (Sums, usize) {
    let mut live: Sums = vec![(vec![], 0.0)];
    let mut finished: Sums = Vec::new();
    for len in 1..=params.max_tokens {
        let mut all: Sums = Vec::new();
        for (tokens, sum) in &live {
            for (token, logprob) in (0..).zip(toy.logprobs(tokens)) {
                all.push(([&tokens[..], &[token]].concat(), sum + f64::from(logprob)));
            }
        }
        by_sum(&mut all);
        let ends = |tokens: &Vec<u32>| {
            len == params.max_tokens || params.stop_token_ids.contains(&tokens[len - 1])
        };
        let ended = all.iter().take(params.width).filter(|(tokens, _)| ends(tokens));
        finished.extend(ended.map(|(tokens, sum)| (tokens.clone(), score(params, *sum, len))));
        by_sum(&mut finished);
        finished.truncate(params.width);
        live = all.into_iter().filter(|(tokens, _)| !ends(tokens)).take(params.width).collect();
        let full = finished.len() == params.width;
        let hopeless = |len| full && score(params, live[0].1, len) <= finished[params.width - 1].1;
        let over = live.is_empty()
            || match params.early_stopping {
                EarlyStopping::Always => full,
                EarlyStopping::Heuristic => hopeless(len),
                EarlyStopping::Never if params.length_penalty > 0.0 => hopeless(params.max_tokens),
                EarlyStopping::Never => hopeless(len),
            };
        if over {
            return (finished, len);
        }
    }
    unreachable!("live beams past the limit")
}

const EARLY_STOPPING: [EarlyStopping; 3] =
    [EarlyStopping::Heuristic, EarlyStopping::Always, EarlyStopping::Never];

#[test]
fn a_search_is_the_definition() {
    let (mut early, mut stopped) = (0, 0);
    for seed in 0..400 {
        let toy = Toy { vocab: [1, 3, 8, 30][seed as usize % 4], seed };
        let width = 2 + seed as usize / 4 % 5;
        let max_tokens = 1 + seed as usize % 9;
        let stops: &[u32] = [&[0][..], &[], &[0, 2, 5, 7, 11, 13]][seed as usize % 3];
        for early_stopping in EARLY_STOPPING {
            for length_penalty in [-0.5, 0.0, 0.5, 1.0, 2.0] {
                let base = params(width, max_tokens, stops);
                let params = BeamParams { early_stopping, length_penalty, ..base };
                let (found, steps) = run(toy, &params);
                let (expected, naive_steps) = naive(toy, &params);
                let scores = found.iter().map(|h| (h.token_ids.clone(), h.score));
                assert_eq!(scores.collect::<Vec<_>>(), expected, "{toy:?} {params:?}");
                assert_eq!(steps, naive_steps, "{toy:?} {params:?}");
                early += usize::from(steps < max_tokens);
                stopped += usize::from(found.iter().any(|h| h.stop.is_some()));
            }
        }
    }
    assert!(early > 500 && stopped > 2000, "{early} {stopped}");
}

/// With room for every sequence nothing is lost: a search lists the language.
#[test]
fn a_wide_search_is_an_enumeration() {
    for seed in 0..20 {
        let toy = Toy { vocab: 3, seed };
        let params = BeamParams { length_penalty: 0.7, ..params(64, 4, &[1]) };
        let mut all: Sums = Vec::new();
        let mut open: Sums = vec![(vec![], 0.0)];
        while let Some((tokens, sum)) = open.pop() {
            for (token, logprob) in (0..).zip(toy.logprobs(&tokens)) {
                let longer = [&tokens[..], &[token]].concat();
                let sum = sum + f64::from(logprob);
                if token == 1 || longer.len() == 4 {
                    all.push((longer.clone(), score(&params, sum, longer.len())));
                } else {
                    open.push((longer, sum));
                }
            }
        }
        by_sum(&mut all);
        assert_eq!(all.len(), 1 + 2 + 4 + 24);
        let (found, _) = run(toy, &params);
        assert!(found.iter().all(|h| h.stop.is_some() == (h.token_ids.last() == Some(&1))));
        let found: Sums = found.into_iter().map(|h| (h.token_ids, h.score)).collect();
        assert_eq!(found, all);
    }
}

#[test]
fn one_beam_is_greedy() {
    for seed in 0..50 {
        let toy = Toy { vocab: 8, seed };
        for early_stopping in EARLY_STOPPING {
            let params = BeamParams { early_stopping, ..params(1, 12, &[3]) };
            let mut tokens = Vec::new();
            while tokens.len() < 12 && tokens.last() != Some(&3) {
                tokens.push(toy.best(&tokens, 1)[0].token);
            }
            assert_eq!(run(toy, &params).0[0].token_ids, tokens);
        }
    }
}

#[test]
fn equal_sums_go_by_parent_and_token() {
    let mut search = BeamSearch::new(params(3, 9, &[]));
    let first = search.advance(&[list(&[(9, -1.0), (4, -1.0), (7, -1.0), (8, -1.0)])]);
    assert_eq!(first, Ok(extensions(&[(0, 4), (0, 7), (0, 8)])));
    let lists = [list(&[(5, -2.0), (2, -1.0)]), list(&[(6, -1.0), (1, -1.0)]), list(&[(0, -2.0)])];
    assert_eq!(search.advance(&lists), Ok(extensions(&[(0, 2), (1, 1), (1, 6)])));
}

#[test]
fn a_score_counts_the_stop_token() {
    let mut search = BeamSearch::new(BeamParams { length_penalty: 2.0, ..params(2, 2, &[7]) });
    let first = search.advance(&[list(&[(7, -0.5), (1, -1.0), (2, -3.0)])]);
    assert_eq!(first, Ok(extensions(&[(0, 1), (0, 2)])));
    let lists = [list(&[(7, -0.25), (3, -2.0), (4, -2.5)]), list(&[(3, -0.5)])];
    assert_eq!(search.advance(&lists), Ok(BeamStep::Done));
    let found = search.into_hypotheses(9);
    let expected = [(vec![1, 7], -1.25, -1.25 / 4.0, Some(7)), (vec![7], -0.5, -0.5, Some(7))];
    assert_eq!(found.len(), 2);
    for (found, (token_ids, cumulative_logprob, score, stop)) in found.into_iter().zip(expected) {
        assert_eq!(found, Hypothesis { token_ids, cumulative_logprob, score, stop });
    }
}

/// Only the first `width` candidates may end, at the last token as before.
#[test]
fn one_token_is_the_best_of_the_first() {
    let mut search = BeamSearch::new(params(2, 1, &[8]));
    assert_eq!(search.candidates_per_beam(), 3);
    let lists = [list(&[(3, -1.0), (5, -1.5), (8, -1.6)])];
    assert_eq!(search.advance(&lists), Ok(BeamStep::Done));
    let found = search.into_hypotheses(1);
    let [only] = &found[..] else { panic!("{found:?}") };
    assert_eq!((&only.token_ids[..], only.stop), (&[3][..], None));
}

#[test]
fn many_stop_tokens_leave_width_beams() {
    let mut search = BeamSearch::new(params(2, 5, &[6, 1, 4, 6, 5]));
    assert_eq!(search.candidates_per_beam(), 6);
    let all: Vec<(u32, f32)> =
        [5, 4, 6, 1, 2, 3].iter().enumerate().map(|(i, &t)| (t, -(i as f32) - 1.0)).collect();
    // Two end, and those that go on are not better at their present length …
    assert_eq!(search.advance(&[list(&all)]), Ok(BeamStep::Done));
    assert_eq!(search.into_hypotheses(2).len(), 2);
    // … but may be at a greater one.
    let early_stopping = EarlyStopping::Never;
    let mut search = BeamSearch::new(BeamParams { early_stopping, ..params(2, 5, &[6, 1, 4, 5]) });
    assert_eq!(search.advance(&[list(&all)]), Ok(extensions(&[(0, 2), (0, 3)])));
}

#[test]
fn what_cannot_be_is_no_candidate() {
    let mut search = BeamSearch::new(params(3, 2, &[]));
    let first = [list(&[(1, -0.1), (2, f32::NEG_INFINITY), (3, f32::NEG_INFINITY)])];
    assert_eq!(search.advance(&first), Ok(extensions(&[(0, 1)])));
    assert_eq!(search.advance(&[list(&[(4, -0.2), (5, -0.3)])]), Ok(BeamStep::Done));
    let found: Vec<_> = search.into_hypotheses(3).into_iter().map(|h| h.token_ids).collect();
    assert_eq!(found, [[1, 4], [1, 5]]);
}

#[test]
fn bad_rows_are_errors_and_change_nothing() {
    let mut search = BeamSearch::new(params(2, 3, &[]));
    for bad in [f32::NAN, f32::INFINITY] {
        let lists = [list(&[(1, -1.0), (2, bad)])];
        assert_eq!(search.advance(&lists), Err(RowError::NotANumber));
    }
    for nothing in [&[][..], &[(1, f32::NEG_INFINITY)]] {
        assert_eq!(search.advance(&[list(nothing)]), Err(RowError::NothingAllowed));
    }
    let good = search.advance(&[list(&[(1, -1.0), (2, -2.0)])]);
    assert_eq!(good, Ok(extensions(&[(0, 1), (0, 2)])));
    // One beam without an end does not harm the others.
    let lists = [list(&[]), list(&[(3, -1.0), (4, -2.0)])];
    assert_eq!(search.advance(&lists), Ok(extensions(&[(1, 3), (1, 4)])));
}

#[test]
fn any_length_penalty_gives_numbers() {
    for length_penalty in [f32::MAX, f32::MIN] {
        let mut search = BeamSearch::new(BeamParams { length_penalty, ..params(2, 2, &[]) });
        search.advance(&[list(&[(1, 0.0), (2, -1.0)])]).expect("numbers");
        search.advance(&[list(&[(1, 0.0)]), list(&[(2, -1.0)])]).expect("numbers");
        let scores: Vec<f64> = search.into_hypotheses(2).iter().map(|h| h.score).collect();
        assert!(scores[0] == 0.0 && scores[1] <= 0.0, "{scores:?}");
    }
}

#[test]
#[should_panic(expected = "the search is over")]
fn nothing_comes_after_the_end() {
    let mut search = BeamSearch::new(params(2, 1, &[]));
    for _ in 0..2 {
        search.advance(&[list(&[(1, -1.0)])]).expect("numbers");
    }
}
