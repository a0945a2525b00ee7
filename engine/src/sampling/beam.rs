//! Beam search: which continuations live on, which are finished, and when to stop looking.
//!
//! No tensors and no scheduling: the caller computes the log-probabilities that follow each live
//! beam, [`BeamSearch::advance`] says which beams live on.
//!
//! ```text
//!   live beams ──▶ candidates of all ──▶ ranked ─┬─ of the first `width`, those that end ─▶ finished
//!        ▲          (beam, token, sum)           └─ the first `width` that go on ─┐   (best `width`)
//!        └────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! A candidate's rank is that of its sum of log-probabilities; where sums are equal the lower
//! (so better) parent comes first, then the lower token id. A candidate ends with a stop token, or
//! at `max_tokens`. Finished sequences are ranked by score, sum / length^`length_penalty`, where
//! the length counts generated tokens, the stop token included; of equal ones the first found
//! comes first. A token of probability 0 is no candidate.
//!
//! These are the rules of `generate(num_beams=width, do_sample=False)` in Hugging Face
//! transformers 5 (`_beam_search` in `generation/utils.py`), with sums in f64 instead of f32. As
//! there, one beam is greedy search: it ends at the first stop token.

use super::{RowError, TokenLogprob};
use std::cmp::Ordering;
use std::fmt;

/// When a search with `width` finished sequences stops, before `max_tokens`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EarlyStopping {
    /// Once the best live beam, scored at its present length, is no better than the worst of them
    /// (written as false).
    #[default]
    Heuristic,
    /// At once (written as true).
    Always,
    /// Once the best live beam cannot become better than the worst of them: as `Heuristic`, but
    /// with a positive length penalty the beam is scored at the length `max_tokens`.
    Never,
}

impl fmt::Display for EarlyStopping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EarlyStopping::Heuristic => "false",
            EarlyStopping::Always => "true",
            EarlyStopping::Never => "never",
        })
    }
}

/// What a search looks for.
#[derive(Clone, Debug, PartialEq)]
pub struct BeamParams {
    /// Live beams, and finished sequences that are kept.
    pub width: usize,
    /// Exponent of the length in a score: above 0 favours long sequences, below 0 short ones.
    pub length_penalty: f32,
    /// When to stop looking.
    pub early_stopping: EarlyStopping,
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// Tokens that end a sequence.
    pub stop_token_ids: Vec<u32>,
}

/// One live beam: an earlier one and a token after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BeamExtension {
    /// Index among the live beams before.
    pub parent: usize,
    /// What follows it.
    pub token: u32,
}

/// What comes after a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BeamStep {
    /// The live beams, best first: `width`, or as many as there are where the vocabulary is small.
    Continue(Vec<BeamExtension>),
    /// The search is over.
    Done,
}

/// A finished sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Hypothesis {
    /// The generated tokens, the stop token included.
    pub token_ids: Vec<u32>,
    /// Sum of their log-probabilities.
    pub cumulative_logprob: f64,
    /// The sum over length^`length_penalty`.
    pub score: f64,
    /// The stop token at its end; `None`: it is `max_tokens` long.
    pub stop: Option<u32>,
}

/// A token of a beam, with the one before it; beams that share a beginning share its nodes.
#[derive(Debug)]
struct Node {
    parent: Option<usize>,
    token: u32,
}

#[derive(Clone, Copy, Debug)]
struct Beam {
    /// Its last token; `None`: it has none yet.
    node: Option<usize>,
    /// Sum of log-probabilities.
    sum: f64,
}

#[derive(Debug)]
struct Finished {
    node: usize,
    sum: f64,
    score: f64,
    stop: Option<u32>,
}

#[derive(Clone, Copy)]
struct Candidate {
    parent: usize,
    token: u32,
    sum: f64,
}

impl Candidate {
    /// Better ones come first.
    fn rank(&self, other: &Self) -> Ordering {
        let ties = || (self.parent, self.token).cmp(&(other.parent, other.token));
        other.sum.total_cmp(&self.sum).then_with(ties)
    }
}

/// A search from one prompt.
#[derive(Debug)]
pub struct BeamSearch {
    params: BeamParams,
    nodes: Vec<Node>,
    /// Best first; at most `width`.
    live: Vec<Beam>,
    /// Best first; at most `width`.
    finished: Vec<Finished>,
    /// Tokens of every live beam.
    num_tokens: usize,
}

impl BeamSearch {
    /// A search whose only live beam is the prompt.
    ///
    /// # Panics
    /// `width` or `max_tokens` is 0.
    pub fn new(mut params: BeamParams) -> Self {
        assert!(params.width > 0 && params.max_tokens > 0, "nothing to look for: {params:?}");
        params.stop_token_ids.sort_unstable();
        params.stop_token_ids.dedup();
        if params.width == 1 {
            params.early_stopping = EarlyStopping::Always;
        }
        let live = vec![Beam { node: None, sum: 0.0 }];
        BeamSearch { params, nodes: Vec::new(), live, finished: Vec::new(), num_tokens: 0 }
    }

    /// How many of a beam's most likely tokens [`BeamSearch::advance`] has to see: `width` go on
    /// or end even if every stop token is before them. Fewer only where the vocabulary is smaller.
    pub fn candidates_per_beam(&self) -> usize {
        self.params.width + self.params.stop_token_ids.len()
    }

    /// Takes the log-probabilities of the tokens after each live beam, in the order of the last
    /// [`BeamStep::Continue`] (at first: after the prompt), and chooses the next live beams.
    ///
    /// # Errors
    /// A log-probability is NaN or +∞, or no beam has a token to go on with. The search is as
    /// before.
    ///
    /// # Panics
    /// There is not one entry a live beam, or the search is over.
    pub fn advance(
        &mut self,
        candidates: &[impl AsRef<[TokenLogprob]>],
    ) -> Result<BeamStep, RowError> {
        assert!(!self.live.is_empty(), "the search is over");
        assert_eq!(candidates.len(), self.live.len(), "one list of candidates a live beam");
        let ranked = self.ranked(candidates)?;
        let beams = std::mem::take(&mut self.live);
        self.num_tokens += 1;
        let at_limit = self.num_tokens == self.params.max_tokens;
        let width = self.params.width;
        let mut extensions = Vec::with_capacity(width);
        for (rank, &Candidate { parent, token, sum }) in ranked.iter().enumerate() {
            let stop = self.params.stop_token_ids.binary_search(&token).is_ok().then_some(token);
            let ends = at_limit || stop.is_some();
            let dropped = if ends { rank >= width } else { self.live.len() == width };
            if dropped {
                continue;
            }
            let node = self.nodes.len();
            self.nodes.push(Node { parent: beams[parent].node, token });
            if ends {
                self.finish(node, sum, stop);
            } else {
                self.live.push(Beam { node: Some(node), sum });
                extensions.push(BeamExtension { parent, token });
            }
        }
        if self.is_over() {
            self.live.clear();
            return Ok(BeamStep::Done);
        }
        Ok(BeamStep::Continue(extensions))
    }

    /// The `n` best finished sequences, best first; fewer where so few could be found.
    pub fn into_hypotheses(self, n: usize) -> Vec<Hypothesis> {
        let hypothesis = |found: &Finished| Hypothesis {
            token_ids: self.token_ids(found.node),
            cumulative_logprob: found.sum,
            score: found.score,
            stop: found.stop,
        };
        self.finished.iter().take(n).map(hypothesis).collect()
    }

    /// The candidates of all beams, best first.
    fn ranked(
        &self,
        candidates: &[impl AsRef<[TokenLogprob]>],
    ) -> Result<Vec<Candidate>, RowError> {
        let mut ranked = Vec::new();
        for (parent, (beam, candidates)) in self.live.iter().zip(candidates).enumerate() {
            for &TokenLogprob { token, logprob } in candidates.as_ref() {
                if logprob.is_nan() || logprob == f32::INFINITY {
                    return Err(RowError::NotANumber);
                }
                if logprob > f32::NEG_INFINITY {
                    ranked.push(Candidate { parent, token, sum: beam.sum + f64::from(logprob) });
                }
            }
        }
        if ranked.is_empty() {
            return Err(RowError::NothingAllowed);
        }
        ranked.sort_unstable_by(Candidate::rank);
        Ok(ranked)
    }

    /// Keeps a finished sequence if it is among the best.
    fn finish(&mut self, node: usize, sum: f64, stop: Option<u32>) {
        let score = self.score(sum, self.num_tokens);
        let at = self.finished.partition_point(|other| other.score >= score);
        self.finished.insert(at, Finished { node, sum, score, stop });
        self.finished.truncate(self.params.width);
    }

    fn score(&self, sum: f64, num_tokens: usize) -> f64 {
        // The power may be 0 or infinite, and 0 / 0 is no score.
        if sum == 0.0 {
            return 0.0;
        }
        sum / (num_tokens as f64).powf(self.params.length_penalty.into())
    }

    fn is_over(&self) -> bool {
        let Some(best) = self.live.first() else { return true };
        if self.finished.len() < self.params.width {
            return false;
        }
        let num_tokens = match self.params.early_stopping {
            EarlyStopping::Always => return true,
            EarlyStopping::Never if self.params.length_penalty > 0.0 => self.params.max_tokens,
            EarlyStopping::Never | EarlyStopping::Heuristic => self.num_tokens,
        };
        let worst = self.finished.last().map_or(f64::NEG_INFINITY, |found| found.score);
        self.score(best.sum, num_tokens) <= worst
    }

    /// The tokens up to `node`.
    fn token_ids(&self, node: usize) -> Vec<u32> {
        let parent = |&node: &usize| self.nodes[node].parent;
        let path = std::iter::successors(Some(node), parent);
        let mut ids: Vec<u32> = path.map(|node| self.nodes[node].token).collect();
        ids.reverse();
        ids
    }
}

#[cfg(test)]
#[path = "beam_tests.rs"]
mod tests;
