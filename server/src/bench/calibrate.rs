//! Measures the [`StepModel`] of an engine.

use super::dataset::{Random, greedy};
use super::predict::{StepModel, interpolate};
use super::stats::percentile;
use quire_engine::scheduler::Policy;
use quire_engine::{Engine, EngineError, Request};
use std::time::{Duration, Instant};

/// Steps of decodes that are timed for each batch size.
const DECODE_STEPS: usize = 8;
/// Prompts that are timed for each length.
const PROMPTS: usize = 3;
/// Tokens of the prompts of decodes.
const SHORT: usize = 8;
/// Sequences, and tokens of their prompts, at most, that show what a longer context costs.
const LONG: (usize, usize) = (4, 512);

/// Measures `engine`, which is idle and is left idle and without cached prefixes.
///
/// # Errors
/// A step failed.
pub fn calibrate(engine: &mut Engine) -> Result<StepModel, EngineError> {
    let mut calibration = Calibration { engine, random: Random::new(u64::MAX) };
    let model = calibration.model();
    calibration.engine.reset_prefix_cache();
    model
}

struct Calibration<'a> {
    engine: &'a mut Engine,
    random: Random,
}

impl Calibration<'_> {
    fn model(&mut self) -> Result<StepModel, EngineError> {
        let limits = self.engine.limits();
        let (budget, max_len) = (limits.max_num_batched_tokens, limits.max_model_len);
        let mut model = StepModel::default();
        for tokens in powers_of_two(budget.min(max_len - 1).max(1)) {
            let seconds = self.prompt(tokens, PROMPTS)?;
            model.body.push((tokens, seconds));
        }
        // A second step of a prompt shows what the keys before it cost.
        let deep = (2 * budget).min(max_len - 1).min(limits_of_pool(self.engine));
        if deep >= budget + budget / 2 {
            let after = deep - budget;
            let seconds = self.second_step(deep)? - interpolate(&model.body, after);
            model.prefill_pair_s = (seconds / (after * budget) as f64).max(0.0);
        }
        for (tokens, seconds) in &mut model.body {
            *seconds -= model.prefill_pair_s * (*tokens * *tokens / 2) as f64;
        }
        let decode_len = DECODE_STEPS + 2;
        let short = SHORT.min(max_len.saturating_sub(decode_len)).max(1);
        let long = LONG.1.min(max_len.saturating_sub(decode_len));
        let seqs = LONG.0.min(self.seats(long + decode_len));
        if long >= 2 * short && seqs > 0 {
            let seconds = self.decode(seqs, long)? - self.decode(seqs, short)?;
            model.decode_key_s = (seconds / (seqs * (long - short)) as f64).max(0.0);
        }
        for rows in powers_of_two(self.seats(short + decode_len)) {
            let keys = rows * (short + decode_len / 2);
            let known = interpolate(&model.body, rows) + model.decode_key_s * keys as f64;
            let seconds = self.decode(rows, short)? - known;
            model.rows.push((rows, if rows == 1 { 0.0 } else { seconds.max(0.0) }));
        }
        Ok(model)
    }

    /// Sequences of `tokens` that run at once.
    fn seats(&self, tokens: usize) -> usize {
        let limits = self.engine.limits();
        let tokens = if limits.policy == Policy::Static { limits.max_model_len } else { tokens };
        let fit = limits.num_blocks / tokens.div_ceil(limits.block_size).max(1);
        fit.min(limits.max_num_seqs).min(limits.max_num_batched_tokens)
    }

    fn add(&mut self, prompt_len: usize, output_len: usize) {
        let prompt = self.random.ids(prompt_len, self.engine.vocab_size());
        let mut request = Request::new(prompt, greedy(output_len));
        request.stream = true;
        self.engine.add_request(request).expect("its length fits the context");
    }

    /// The time of a step, and the tokens it brought.
    fn step(&mut self) -> Result<(Duration, usize), EngineError> {
        let start = Instant::now();
        let tokens = self.engine.step()?.deltas.len();
        Ok((start.elapsed(), tokens))
    }

    fn finish(&mut self) -> Result<(), EngineError> {
        while self.engine.num_unfinished() > 0 {
            self.engine.step()?;
        }
        Ok(())
    }

    /// Seconds of a step that computes a prompt: the median of `times`.
    fn prompt(&mut self, tokens: usize, times: usize) -> Result<f64, EngineError> {
        let mut seconds = Vec::new();
        for _ in 0..times {
            self.add(tokens, 1);
            seconds.push(self.step()?.0.as_secs_f64());
            self.finish()?;
        }
        Ok(median(&seconds))
    }

    /// Seconds of the second step of a prompt.
    fn second_step(&mut self, tokens: usize) -> Result<f64, EngineError> {
        self.add(tokens, 1);
        self.step()?;
        let seconds = self.step()?.0.as_secs_f64();
        self.finish()?;
        Ok(seconds)
    }

    /// Seconds of a step in which `rows` sequences decode: the median of several.
    fn decode(&mut self, rows: usize, prompt_len: usize) -> Result<f64, EngineError> {
        // Those whose prompts come first go on decoding until the last one has joined them.
        let budget = self.engine.limits().max_num_batched_tokens;
        let room = self.engine.limits().max_model_len - prompt_len;
        let prompt_steps = (rows * prompt_len).div_ceil(budget.saturating_sub(rows).max(1));
        let output_len = (prompt_steps + DECODE_STEPS + 2).min(room);
        for _ in 0..rows {
            self.add(prompt_len, output_len);
        }
        let mut seconds = Vec::new();
        let mut all_decode = false;
        while self.engine.num_unfinished() > 0 && seconds.len() < DECODE_STEPS {
            let (time, tokens) = self.step()?;
            if all_decode && tokens == rows {
                seconds.push(time.as_secs_f64());
            }
            all_decode |= tokens == rows;
        }
        self.finish()?;
        Ok(median(&seconds))
    }
}

/// Tokens that one sequence may have.
fn limits_of_pool(engine: &Engine) -> usize {
    let limits = engine.limits();
    (limits.num_blocks * limits.block_size).saturating_sub(1)
}

fn median(values: &[f64]) -> f64 {
    percentile(values, 50.0).unwrap_or(0.0)
}

/// 1, 2, 4, … and `most`; nothing for 0.
fn powers_of_two(most: usize) -> Vec<usize> {
    let mut all: Vec<usize> =
        std::iter::successors(Some(1), |n| Some(2 * n)).take_while(|&n| n < most).collect();
    all.extend((most > 0).then_some(most));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_point_is_the_limit() {
        assert_eq!(powers_of_two(0), []);
        assert_eq!(powers_of_two(1), [1]);
        assert_eq!(powers_of_two(8), [1, 2, 4, 8]);
        assert_eq!(powers_of_two(9), [1, 2, 4, 8, 9]);
    }
}
