//! The sampler: one row of logits to one token.

use super::params::GREEDY_BELOW;
use super::select::{cut, order_key};
use super::{RowError, RowTarget, SampleOutput, SamplingBatch, SamplingRow};
use super::{TokenLogprob, TokenLogprobs, processors};
use quire_kernels_cpu::{Isa, gumbel, gumbel_argmax, vecmath};

/// Fixed-point unit of probability mass in top-p: sums are exact whatever their order.
const MASS_ONE: f32 = (1u64 << 40) as f32;
/// With fewer candidates than this fraction of the vocabulary, noise is drawn for them alone.
const SPARSE: usize = 32;

/// Buffers of the sampler, reused across rows.
#[derive(Debug)]
pub struct Sampler {
    isa: Isa,
    raw: Vec<f32>,
    weights: Vec<f32>,
    ids: Vec<u32>,
    keys: Vec<u32>,
    histogram: Vec<u64>,
}

impl Sampler {
    /// A sampler that computes on `isa`; its results do not depend on it.
    pub fn new(isa: Isa) -> Self {
        Sampler {
            isa,
            raw: Vec::new(),
            weights: Vec::new(),
            ids: Vec::new(),
            keys: Vec::new(),
            histogram: Vec::new(),
        }
    }

    /// Keeps a copy of the raw logits and returns their normaliser, as (max, ln Σ exp(x − max)),
    /// with the `n` best tokens. ln p(token) = logit − max − ln Σ.
    fn raw_logprobs(&mut self, logits: &[f32], n: usize) -> ((f32, f32), Vec<TokenLogprob>) {
        let max = vecmath::max_slice(self.isa, logits);
        let log_sum = vecmath::ln(vecmath::sum_exp_sub(self.isa, logits, max));
        self.raw.clear();
        self.raw.extend_from_slice(logits);
        ((max, log_sum), top_tokens(logits, n, max, log_sum))
    }

    /// Fills `ids` with the tokens that pass min-p, top-k and top-p, ascending. The largest logit
    /// is 0.
    fn filter(&mut self, logits: &[f32], row: &SamplingRow) {
        self.weights.resize(logits.len(), 0.0);
        vecmath::exp_sub_slice(self.isa, logits, 0.0, &mut self.weights);
        self.ids.clear();
        let weights = &self.weights;
        self.ids.extend((0..logits.len() as u32).filter(|&i| {
            logits[i as usize] > f32::NEG_INFINITY && weights[i as usize] >= row.min_p
        }));
        if row.top_k > 0 && (row.top_k as usize) < self.ids.len() {
            self.keep(logits, u64::from(row.top_k), |_| 1);
        }
        if row.top_p < 1.0 {
            let mass = |w: f32| (w * MASS_ONE) as u64;
            let weights = std::mem::take(&mut self.weights);
            let total: u64 = self.ids.iter().map(|&i| mass(weights[i as usize])).sum();
            let target = ((f64::from(row.top_p) * total as f64).ceil() as u64).clamp(1, total);
            self.keep(logits, target, |id| mass(weights[id as usize]));
            self.weights = weights;
        }
    }

    /// Keeps the most likely of `ids` that together weigh `target`, ties included.
    fn keep(&mut self, logits: &[f32], target: u64, weight: impl Fn(u32) -> u64) {
        self.keys.clear();
        self.keys.extend(self.ids.iter().map(|&i| order_key(logits[i as usize])));
        let ids = &self.ids;
        let least = cut(&self.keys, |i| weight(ids[i]), target, &mut self.histogram);
        self.ids.retain(|&i| order_key(logits[i as usize]) >= least);
    }
}

/// Chooses the token of one row of `batch`, or takes the given one. `logits` (`[vocab]`, padding
/// already cut off) is overwritten.
pub fn sample_row(
    sampler: &mut Sampler,
    logits: &mut [f32],
    row: &SamplingRow,
    batch: &SamplingBatch,
) -> SampleOutput {
    match choose(sampler, logits, row, batch) {
        Ok((token, logprobs)) => SampleOutput { token: Ok(token), logprobs },
        Err(error) => SampleOutput { token: Err(error), logprobs: None },
    }
}

fn choose(
    sampler: &mut Sampler,
    logits: &mut [f32],
    row: &SamplingRow,
    batch: &SamplingBatch,
) -> Result<(u32, Option<TokenLogprobs>), RowError> {
    check_row(sampler.isa, logits)?;
    let raw = row.logprobs.map(|n| sampler.raw_logprobs(logits, n as usize));
    let token = match row.target {
        RowTarget::Given(token) => token,
        _ => {
            processors::process(logits, row, batch)?;
            check_row(sampler.isa, logits)?;
            if row.temperature < GREEDY_BELOW {
                vecmath::argmax(sampler.isa, logits) as u32
            } else {
                draw(sampler, logits, row)
            }
        }
    };
    // A given token may be padding of the output matrix, which has no probability.
    let raw_logit = |raw: &[f32]| raw.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    let logprobs = raw.map(|(normaliser, top)| {
        let logprob = raw_logit(&sampler.raw) - normaliser.0 - normaliser.1;
        TokenLogprobs { sampled: TokenLogprob { token, logprob }, top }
    });
    Ok((token, logprobs))
}

/// Refuses rows no token can be chosen from.
fn check_row(isa: Isa, logits: &[f32]) -> Result<(), RowError> {
    let max = vecmath::max_slice(isa, logits);
    if vecmath::has_nan(isa, logits) || max == f32::INFINITY {
        return Err(RowError::NotANumber);
    }
    if max == f32::NEG_INFINITY {
        return Err(RowError::NothingAllowed);
    }
    Ok(())
}

/// A draw from the softmax of `logits / temperature`, filtered.
fn draw(sampler: &mut Sampler, logits: &mut [f32], row: &SamplingRow) -> u32 {
    let best = vecmath::argmax(sampler.isa, logits) as u32;
    // Relative to the maximum: a small temperature can send logits to −∞ only.
    let max = logits[best as usize];
    for x in logits.iter_mut() {
        *x = (*x - max) / row.temperature;
    }
    if row.top_k == 0 && row.top_p == 1.0 && row.min_p == 0.0 {
        return gumbel_argmax(sampler.isa, logits, row.seed, row.position);
    }
    sampler.filter(logits, row);
    if sampler.ids.len() * SPARSE > logits.len() {
        keep_sorted(logits, &sampler.ids);
        return gumbel_argmax(sampler.isa, logits, row.seed, row.position);
    }
    let (mut token, mut score) = (best, f32::NEG_INFINITY);
    for &id in &sampler.ids {
        let s = logits[id as usize] + gumbel(row.seed, row.position, id);
        if s > score {
            (token, score) = (id, s);
        }
    }
    token
}

/// −∞ for every id that is not in `ids`, which ascend.
fn keep_sorted(logits: &mut [f32], ids: &[u32]) {
    let mut next = 0;
    for &id in ids {
        logits[next..id as usize].fill(f32::NEG_INFINITY);
        next = id as usize + 1;
    }
    logits[next..].fill(f32::NEG_INFINITY);
}

/// Above this many, sorting everything is faster than keeping the best.
const FEW: usize = 64;

/// The `n` largest logits as log-probabilities, best first, equal ones by id.
fn top_tokens(logits: &[f32], n: usize, max: f32, log_sum: f32) -> Vec<TokenLogprob> {
    let all = logits.iter().enumerate().map(|(id, &x)| (x, id as u32));
    let mut top: Vec<(f32, u32)> = Vec::new();
    if n > FEW {
        top.extend(all);
        // Stable, and the ids ascend: equal logits stay in order.
        top.sort_by(|a, b| b.0.partial_cmp(&a.0).expect("rows with NaN are refused"));
        top.truncate(n);
    } else {
        for (x, id) in all {
            if top.len() == n && top.last().is_none_or(|&(least, _)| x <= least) {
                continue;
            }
            let at = top.partition_point(|&(y, _)| y >= x);
            top.insert(at, (x, id));
            top.truncate(n);
        }
    }
    let logprob = |(x, token): (f32, u32)| TokenLogprob { token, logprob: x - max - log_sum };
    top.into_iter().map(logprob).collect()
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
