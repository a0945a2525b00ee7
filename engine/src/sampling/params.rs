//! What a request may ask of the sampler, with the rules of each field.

use std::fmt::Display;

/// Below this temperature sampling is greedy.
pub(crate) const GREEDY_BELOW: f32 = 1e-5;
/// Temperatures between greedy and this are raised to it: dividing by less overflows.
const MIN_TEMPERATURE: f32 = 0.01;
/// Most log-probabilities a request may ask for at one position.
pub const MAX_LOGPROBS: u32 = 20;

/// Sampling parameters under the field's usual names. [`SamplingParams::validate`] checks them.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Tokens to generate at most; `None`: the rest of the context.
    pub max_tokens: Option<usize>,
    /// Until this many tokens are generated, EOS and stop ids are not sampled and stop strings
    /// do not end the request.
    pub min_tokens: usize,
    /// 0 (anything below 1e-5) is greedy; between that and 0.01 is raised to 0.01.
    pub temperature: f32,
    /// Keep the k most likely tokens, and those equal to the last; 0 = all.
    pub top_k: u32,
    /// Keep the smallest set of most likely tokens with this mass, and those equal to the last.
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the most likely one.
    pub min_p: f32,
    /// Seed of the draws; `None`: one made from the engine's seed and the request's number.
    pub seed: Option<u64>,
    /// Strings that end the output.
    pub stop: Vec<String>,
    /// Tokens that end the output.
    pub stop_token_ids: Vec<u32>,
    /// Keep the stop string in the text.
    pub include_stop_str_in_output: bool,
    /// Do not stop at the model's EOS.
    pub ignore_eos: bool,
    /// Log-probabilities of the sampled token and this many best ones.
    pub logprobs: Option<u32>,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: bool,
    /// Produce text at all.
    pub detokenize: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            max_tokens: Some(16),
            min_tokens: 0,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: None,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            include_stop_str_in_output: false,
            ignore_eos: false,
            logprobs: None,
            skip_special_tokens: true,
            detokenize: true,
        }
    }
}

/// A parameter outside its rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} must be {rule}, got {value}")]
pub struct ParamError {
    /// Name of the parameter.
    pub field: &'static str,
    /// What it must be.
    pub rule: String,
    /// What it was.
    pub value: String,
}

fn check(
    ok: bool,
    field: &'static str,
    rule: impl Display,
    value: impl Display,
) -> Result<(), ParamError> {
    if ok {
        return Ok(());
    }
    Err(ParamError { field, rule: rule.to_string(), value: value.to_string() })
}

impl SamplingParams {
    /// Sampling takes the most likely token.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW
    }

    /// The temperature logits are divided by; 0 when greedy.
    pub fn effective_temperature(&self) -> f32 {
        if self.is_greedy() { 0.0 } else { self.temperature.max(MIN_TEMPERATURE) }
    }

    /// Checks every field against its rule and `vocab_size`.
    pub fn validate(&self, vocab_size: usize) -> Result<(), ParamError> {
        use crate::text::{MAX_STOP_BYTES, MAX_STOP_STRINGS};
        let t = self.temperature;
        check(t.is_finite() && t >= 0.0, "temperature", "finite and at least 0", t)?;
        let p = self.top_p;
        let top_p_ok = (p > 0.0 && p <= 1.0) || (p == 0.0 && self.is_greedy());
        check(top_p_ok, "top_p", "in (0, 1] (0 only with temperature 0)", p)?;
        check((0.0..=1.0).contains(&self.min_p), "min_p", "in [0, 1]", self.min_p)?;
        if let Some(max) = self.max_tokens {
            check(max >= 1, "max_tokens", "at least 1", max)?;
            let rule = format_args!("at most max_tokens ({max})").to_string();
            check(self.min_tokens <= max, "min_tokens", rule, self.min_tokens)?;
        }
        if let Some(n) = self.logprobs {
            check(n <= MAX_LOGPROBS, "logprobs", format!("at most {MAX_LOGPROBS}"), n)?;
        }
        let n = self.stop.len();
        check(n <= MAX_STOP_STRINGS, "stop", format!("at most {MAX_STOP_STRINGS} strings"), n)?;
        for s in &self.stop {
            check(!s.is_empty(), "stop", "without empty strings", "\"\"")?;
            let rule = format!("at most {MAX_STOP_BYTES} bytes a string");
            check(s.len() <= MAX_STOP_BYTES, "stop", rule, format!("{} bytes", s.len()))?;
        }
        let n = self.stop_token_ids.len();
        check(n <= vocab_size, "stop_token_ids", format!("at most {vocab_size} ids"), n)?;
        for &id in &self.stop_token_ids {
            let rule = format!("below the vocabulary size {vocab_size}");
            check((id as usize) < vocab_size, "stop_token_ids", rule, id)?;
        }
        Ok(())
    }
}
