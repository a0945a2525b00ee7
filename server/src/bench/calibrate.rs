//! Measures the [`StepModel`] of an engine.

use super::dataset::{Random, greedy};
use super::predict::{StepModel, interpolate};
use quire_engine::{Engine, EngineError, Request, RequestId};
use std::time::{Duration, Instant};

/// Times that everything is measured; the shortest counts, as others on the machine only add.
const ROUNDS: usize = 3;
/// Steps of decodes that are timed in a round.
const DECODE_STEPS: usize = 8;
/// Steps at most until all of a measurement decode, and have done so: the last prompts get few
/// tokens a step, as those before them decode already.
const MAX_STEPS: usize = 1000;
/// Tokens of the prompts of decodes.
const SHORT: usize = 8;
/// Sequences, and tokens of their prompts, at most, that show what a longer context costs.
const LONG: (usize, usize) = (4, 256);

/// Measures `engine`, which is idle and is left idle. `None`: its context is too short.
///
/// # Errors
/// A step failed.
pub fn calibrate(engine: &mut Engine) -> Result<Option<StepModel>, EngineError> {
    if engine.limits().max_model_len < 2 * SHORT + DECODE_STEPS {
        return Ok(None);
    }
    Calibration { engine, random: Random::new(u64::MAX) }.model().map(Some)
}

struct Calibration<'a> {
    engine: &'a mut Engine,
    random: Random,
}

impl Calibration<'_> {
    fn model(&mut self) -> Result<StepModel, EngineError> {
        let limits = self.engine.limits();
        let (budget, max_len) = (limits.max_num_batched_tokens, limits.max_model_len);
        let seats = limits.max_num_seqs.min(budget);
        let (seqs, long) = (LONG.0.min(seats), LONG.1.min(max_len - 2 * DECODE_STEPS));
        // A second step of a prompt shows what the keys before it cost.
        let pool = limits.num_blocks * limits.block_size;
        let deep = (2 * budget).min(max_len - 1).min(pool - 1);

        let unknown = |n: usize| (n, f64::INFINITY);
        let mut prompts: Vec<_> =
            powers_of_two(budget.min(max_len - 1)).into_iter().map(unknown).collect();
        let mut decodes: Vec<_> = powers_of_two(seats).into_iter().map(unknown).collect();
        let (mut second_step, mut long_decode) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..ROUNDS {
            for (tokens, seconds) in &mut prompts {
                *seconds = seconds.min(self.prompt(*tokens)?);
            }
            if deep >= budget + budget / 2 {
                second_step = second_step.min(self.second_step(deep)?);
            }
            for (rows, seconds) in &mut decodes {
                *seconds = seconds.min(self.decode(*rows, SHORT)?);
            }
            // Those that cannot all decode together are not known.
            decodes.retain(|(_, seconds)| seconds.is_finite());
            if long >= 2 * SHORT {
                long_decode = long_decode.min(self.decode(seqs, long)?);
            }
        }
        let mut model = StepModel { body: prompts, ..StepModel::default() };
        if second_step.is_finite() {
            let after = deep - budget;
            let seconds = second_step - interpolate(&model.body, after);
            model.prefill_pair_s = (seconds / (after * budget) as f64).max(0.0);
        }
        for (tokens, seconds) in &mut model.body {
            *seconds -= model.prefill_pair_s * (*tokens * *tokens / 2) as f64;
        }
        if long_decode.is_finite() && !decodes.is_empty() {
            let seconds = long_decode - interpolate(&decodes, seqs);
            model.decode_key_s = (seconds / (seqs * (long - SHORT)) as f64).max(0.0);
        }
        model.rows = decodes;
        for (rows, seconds) in &mut model.rows {
            let keys = (*rows * (SHORT + DECODE_STEPS / 2)) as f64;
            let known = interpolate(&model.body, *rows) + model.decode_key_s * keys;
            *seconds = (*seconds - known).max(0.0);
        }
        Ok(model)
    }

    fn add(&mut self, prompt_len: usize, output_len: usize) -> RequestId {
        let prompt = self.random.ids(prompt_len, self.engine.vocab_size());
        let mut request = Request::new(prompt, greedy(output_len));
        request.stream = true;
        self.engine.add_request(request).expect("its length fits the context")
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

    /// Seconds of a step that computes a prompt.
    fn prompt(&mut self, tokens: usize) -> Result<f64, EngineError> {
        self.add(tokens, 1);
        let seconds = self.step()?.0.as_secs_f64();
        self.finish()?;
        Ok(seconds)
    }

    /// Seconds of the second step of a prompt.
    fn second_step(&mut self, tokens: usize) -> Result<f64, EngineError> {
        self.add(tokens, 1);
        self.step()?;
        let seconds = self.step()?.0.as_secs_f64();
        self.finish()?;
        Ok(seconds)
    }

    /// Seconds of a step in which `rows` sequences decode: the shortest of several. Infinite: so
    /// many never do, for want of blocks or because the first end before the last begin.
    fn decode(&mut self, rows: usize, prompt_len: usize) -> Result<f64, EngineError> {
        let limits = self.engine.limits();
        let blocks = (prompt_len + DECODE_STEPS).div_ceil(limits.block_size);
        if rows * blocks > limits.num_blocks {
            return Ok(f64::INFINITY);
        }
        // Those whose prompts come first go on decoding until the last one has joined them.
        let output_len = limits.max_model_len - prompt_len;
        let ids: Vec<RequestId> = (0..rows).map(|_| self.add(prompt_len, output_len)).collect();
        let seconds = self.full_decodes(rows);
        for id in ids {
            self.engine.abort(id);
        }
        seconds
    }

    /// The shortest of the steps that bring `rows` tokens, but for the first, in which a prompt may
    /// have ended.
    fn full_decodes(&mut self, rows: usize) -> Result<f64, EngineError> {
        let num_preemptions = self.engine.stats().num_preemptions();
        let (mut seconds, mut full_steps) = (f64::INFINITY, 0);
        for _ in 0..MAX_STEPS {
            let (time, tokens) = self.step()?;
            if tokens == rows {
                seconds = if full_steps == 0 { seconds } else { seconds.min(time.as_secs_f64()) };
                full_steps += 1;
            }
            let one_ended = self.engine.num_unfinished() < rows;
            let one_gave_way = self.engine.stats().num_preemptions() > num_preemptions;
            if full_steps > DECODE_STEPS || one_ended || one_gave_way {
                break;
            }
        }
        Ok(seconds)
    }
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
        assert!(powers_of_two(0).is_empty());
        assert_eq!(powers_of_two(1), [1]);
        assert_eq!(powers_of_two(8), [1, 2, 4, 8]);
        assert_eq!(powers_of_two(9), [1, 2, 4, 8, 9]);
    }
}
