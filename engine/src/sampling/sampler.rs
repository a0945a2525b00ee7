//! The sampler: one row of logits to one token.

use super::params::GREEDY_BELOW;
use super::select::{BINS, cut, order_key};
use super::{RowError, RowTarget, SampleOutput, SamplingBatch, SamplingRow};
use super::{TokenLogprob, TokenLogprobs, processors};
use quire_kernels_cpu::{Isa, gumbel, gumbel_argmax, vecmath};

/// Fixed-point unit of probability mass in top-p: sums are exact whatever their order.
const MASS_ONE: f32 = (1u64 << 40) as f32;
/// Logits in a block whose maximum bounds the top-k cut.
const BLOCK: usize = 128;
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

    /// Most bytes that the buffers take for a vocabulary of `vocab_size`; `None`: more than can be
    /// addressed. Those filled by what passes a filter may be twice as long as needed.
    pub fn max_bytes(vocab_size: usize) -> Option<usize> {
        let words = vocab_size.checked_mul(1 + 1 + 2 + 2)?;
        words.checked_mul(4)?.checked_add(BINS * 8)
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
    /// is 0. Tokens that cannot pass are left out before anything is counted.
    fn filter(&mut self, logits: &[f32], row: &SamplingRow) {
        let weigh_all = row.min_p > 0.0 || row.top_k == 0;
        if weigh_all {
            self.weights.resize(logits.len(), 0.0);
            vecmath::exp_sub_slice(self.isa, logits, 0.0, &mut self.weights);
        }
        let least_key = self.top_k_bound(logits, row.top_k);
        let mut ids = std::mem::take(&mut self.ids);
        ids.clear();
        ids.extend((0..logits.len() as u32).filter(|&i| {
            let x = logits[i as usize];
            x > f32::NEG_INFINITY && order_key(x) >= least_key
        }));
        // Without top-k, top-p is of all that passes min-p.
        let whole_mass = (row.top_k == 0 && row.top_p < 1.0)
            .then(|| vecmath::fixed_sum(self.isa, &self.weights, row.min_p, MASS_ONE));
        if weigh_all {
            let bound = whole_mass.map_or(0.0, |total| top_p_bound(row.top_p, total, logits.len()));
            let least_weight = row.min_p.max(bound);
            ids.retain(|&i| self.weights[i as usize] >= least_weight);
        }
        self.ids = ids;
        if row.top_k > 0 && (row.top_k as usize) < self.ids.len() {
            self.keep(logits, u64::from(row.top_k), |_| 1);
        }
        if row.top_p < 1.0 {
            let weights = std::mem::take(&mut self.weights);
            let mass = |id: u32| match weigh_all {
                true => mass(weights[id as usize]),
                false => mass(vecmath::exp(logits[id as usize])),
            };
            let total = whole_mass.unwrap_or_else(|| self.ids.iter().map(|&i| mass(i)).sum());
            self.keep(logits, target_mass(row.top_p, total), mass);
            self.weights = weights;
        }
    }

    /// A key that the `k` largest logits reach: the k-th largest of the maxima of blocks.
    fn top_k_bound(&mut self, logits: &[f32], k: u32) -> u32 {
        let maxima = logits.chunks(BLOCK).map(|block| vecmath::max_slice(self.isa, block));
        if k == 0 || k as usize > logits.len() / BLOCK {
            return 0;
        }
        self.keys.clear();
        self.keys.extend(maxima.map(order_key));
        cut(&self.keys, |_| 1, u64::from(k), &mut self.histogram)
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

/// A weight in [0, 1] in fixed point.
fn mass(weight: f32) -> u64 {
    (weight * MASS_ONE) as u64
}

/// The mass that top-p keeps of `total`.
fn target_mass(top_p: f32, total: u64) -> u64 {
    ((f64::from(top_p) * total as f64).ceil() as u64).clamp(1, total)
}

/// A weight that every token within `top_p` of the mass `total` of `n` tokens reaches. All tokens
/// below (1 − top_p) / n of it together have less than what may be left out; half of that leaves
/// room for rounding.
fn top_p_bound(top_p: f32, total: u64, n: usize) -> f32 {
    let spare = (total - target_mass(top_p, total)) / n as u64;
    (spare / 2) as f32 / MASS_ONE
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
        processors::keep_only(logits, &sampler.ids);
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
