//! The sampler: one row of logits to one token.

use super::params::GREEDY_BELOW;
use super::select::{cut, order_key};
use super::{RowError, SampleOutput, SamplingRow, TokenLogprob, TokenLogprobs};
use super::{philox4x32, uniform};
use quire_kernels_cpu::{Isa, vecmath};

/// Fixed-point unit of probability mass in top-p: sums are exact whatever their order.
const MASS_ONE: f32 = (1u64 << 40) as f32;
/// Gumbel noise never exceeds this: −ln(−ln(1 − 2⁻²⁴)) = 16.63…
const MAX_GUMBEL: f32 = 16.7;

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

    /// `weights = exp(logits − max)`.
    fn weigh(&mut self, logits: &[f32], max: f32) {
        self.weights.resize(logits.len(), 0.0);
        vecmath::exp_sub_slice(self.isa, logits, max, &mut self.weights);
    }

    /// Fills `ids` with the tokens that pass min-p, top-k and top-p, ascending.
    fn filter(&mut self, logits: &[f32], max: f32, row: &SamplingRow) {
        self.weigh(logits, max);
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

/// Chooses the token of one row. `logits` (`[vocab]`, padding already cut off) is overwritten.
pub fn sample_row(
    sampler: &mut Sampler,
    logits: &mut [f32],
    row: &SamplingRow,
    suppressed: &[u32],
) -> SampleOutput {
    let isa = sampler.isa;
    let max = vecmath::max_slice(isa, logits);
    let failed = |error| SampleOutput { token: Err(error), logprobs: None };
    if vecmath::has_nan(isa, logits) || max == f32::INFINITY {
        return failed(RowError::NotANumber);
    }
    if max == f32::NEG_INFINITY {
        return failed(RowError::NothingAllowed);
    }
    // ln p(token) = logit − max − ln Σ exp(logit − max), before any parameter touches the row.
    let raw = row.logprobs.map(|n| {
        let log_sum = vecmath::ln(vecmath::sum_exp_sub(isa, logits, max));
        sampler.raw.clear();
        sampler.raw.extend_from_slice(logits);
        (max, log_sum, top_tokens(logits, n as usize, max, log_sum))
    });
    for &id in suppressed {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    let max = vecmath::max_slice(isa, logits);
    if max == f32::NEG_INFINITY {
        return failed(RowError::NothingAllowed);
    }
    let token = if row.temperature < GREEDY_BELOW {
        vecmath::argmax(isa, logits) as u32
    } else {
        draw(sampler, logits, row)
    };
    let logprobs = raw.map(|(max, log_sum, top)| {
        let logprob = sampler.raw[token as usize] - max - log_sum;
        TokenLogprobs { sampled: TokenLogprob { token, logprob }, top }
    });
    SampleOutput { token: Ok(token), logprobs }
}

/// A draw from the softmax of `logits / temperature`, filtered.
fn draw(sampler: &mut Sampler, logits: &mut [f32], row: &SamplingRow) -> u32 {
    for x in logits.iter_mut() {
        *x /= row.temperature;
    }
    let best = vecmath::argmax(sampler.isa, logits) as u32;
    let noisy = |id: u32| {
        let words = philox4x32(row.seed, [id / 4, row.position, 0, 0]);
        let u = uniform(words[(id % 4) as usize]);
        logits[id as usize] - vecmath::ln(-vecmath::ln(u))
    };
    let filtered = row.top_k > 0 || row.top_p < 1.0 || row.min_p > 0.0;
    if filtered {
        sampler.filter(logits, logits[best as usize], row);
    }
    // Start from the most likely token: most others cannot reach it whatever their noise.
    let (mut token, mut score) = (best, noisy(best));
    let mut consider = |id: u32| {
        if logits[id as usize] + MAX_GUMBEL < score {
            return;
        }
        let s = noisy(id);
        if s > score || (s == score && id < token) {
            (token, score) = (id, s);
        }
    };
    if filtered {
        sampler.ids.iter().copied().for_each(&mut consider);
    } else {
        (0..logits.len() as u32).for_each(&mut consider);
    }
    token
}

/// The `n` largest logits as log-probabilities, best first, equal ones by id.
fn top_tokens(logits: &[f32], n: usize, max: f32, log_sum: f32) -> Vec<TokenLogprob> {
    let mut top: Vec<(f32, u32)> = Vec::with_capacity(n + 1);
    for (id, &x) in logits.iter().enumerate() {
        if top.len() == n && top.last().is_none_or(|&(least, _)| x <= least) {
            continue;
        }
        let at = top.partition_point(|&(y, _)| y >= x);
        top.insert(at, (x, id as u32));
        top.truncate(n);
    }
    let logprob = |(x, token): (f32, u32)| TokenLogprob { token, logprob: x - max - log_sum };
    top.into_iter().map(logprob).collect()
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
