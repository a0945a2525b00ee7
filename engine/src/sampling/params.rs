//! What a request may ask of the sampler, with the rules of each field.

use super::EarlyStopping;
use std::fmt::Display;

/// Below this temperature sampling is greedy.
pub(crate) const GREEDY_BELOW: f32 = 1e-5;
/// Temperatures between greedy and this are raised to it: dividing by less overflows.
const MIN_TEMPERATURE: f32 = 0.01;
/// Most log-probabilities a request may ask for at one position, unless the engine is configured
/// otherwise.
pub const DEFAULT_MAX_LOGPROBS: u32 = 20;
/// Most sequences one request may ask for.
pub const MAX_N: usize = 1024;
/// `logit_bias` is clamped to ± this.
const MAX_LOGIT_BIAS: f32 = 100.0;
/// Most bad words of a request.
pub const MAX_BAD_WORDS: usize = 1024;
/// Most bytes of one bad word.
pub const MAX_BAD_WORD_BYTES: usize = 1024;

/// Most beams of a search.
pub const MAX_BEAM_WIDTH: usize = 64;
/// Most `stop_token_ids` with beams: every beam looks at one more token for each.
pub const MAX_BEAM_STOP_IDS: usize = 64;
/// Most bytes of `cache_salt`.
pub const MAX_CACHE_SALT_BYTES: usize = 1024;

/// How many of the most likely tokens to report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumLogprobs {
    /// This many, besides the token itself.
    Top(u32),
    /// The whole vocabulary (written as -1).
    All,
}

impl NumLogprobs {
    /// The number, for a vocabulary of `vocab_size`.
    pub fn resolve(self, vocab_size: usize) -> u32 {
        match self {
            NumLogprobs::Top(n) => n.min(vocab_size as u32),
            NumLogprobs::All => vocab_size as u32,
        }
    }
}

impl Display for NumLogprobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NumLogprobs::Top(n) => n.fmt(f),
            NumLogprobs::All => f.write_str("-1"),
        }
    }
}

/// What [`SamplingParams::validate`] checks against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamLimits {
    /// Ids that may be sampled are below this.
    pub vocab_size: usize,
    /// Most log-probabilities at one position.
    pub max_logprobs: u32,
}

/// Sampling parameters under the field's usual names. [`SamplingParams::validate`] checks them.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Sequences to generate from the prompt, sample `i` with seed + i; 1 when greedy, except with
    /// `use_beam_search`: the `n` best that were found.
    pub n: usize,
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
    /// Subtracted from the logit of every token in the output so far.
    pub presence_penalty: f32,
    /// Subtracted once for each time a token is in the output so far.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; 1 = off.
    pub repetition_penalty: f32,
    /// Strings that must not be generated, as the tokens they are encoded to, alone or after a
    /// space. (The same text spelt with other tokens is not recognised.)
    pub bad_words: Vec<String>,
    /// Only these tokens may be sampled.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Added to the logits of these tokens, clamped to ±100.
    pub logit_bias: Vec<(u32, f32)>,
    /// Name of a processor registered with [`crate::Engine::register_logits_processor`].
    pub logits_processor: Option<String>,
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
    pub logprobs: Option<NumLogprobs>,
    /// Log-probabilities of the prompt's tokens, the first excepted.
    pub prompt_logprobs: Option<NumLogprobs>,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: bool,
    /// Produce text at all.
    pub detokenize: bool,
    /// Search for the most likely sequences, at temperature 0; see [`super::BeamSearch`].
    pub use_beam_search: bool,
    /// Beams, at least `n`; `None`: as many as `n`.
    pub beam_width: Option<usize>,
    /// Exponent of the length in a beam's score; above 0 favours long sequences.
    pub length_penalty: f32,
    /// When a search may end before `max_tokens`.
    pub early_stopping: EarlyStopping,
    /// Smaller is more urgent.
    pub priority: i32,
    /// Only requests with the same salt share cached prefixes.
    pub cache_salt: Option<String>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            n: 1,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            bad_words: Vec::new(),
            allowed_token_ids: None,
            logit_bias: Vec::new(),
            logits_processor: None,
            prompt_logprobs: None,
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
            use_beam_search: false,
            beam_width: None,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::Heuristic,
            priority: 0,
            cache_salt: None,
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

    /// Beams of a search.
    pub fn effective_beam_width(&self) -> usize {
        self.beam_width.unwrap_or(self.n)
    }

    /// The bias of each token in `logit_bias`, clamped; of a token that is there twice, their sum.
    pub(crate) fn clamped_bias(&self) -> Vec<(u32, f32)> {
        let clamp = |x: f32| x.clamp(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS);
        let mut biases: Vec<(u32, f32)> =
            self.logit_bias.iter().map(|&(id, bias)| (id, clamp(bias))).collect();
        biases.sort_by_key(|&(id, _)| id);
        biases.dedup_by(|next, first| {
            let same = next.0 == first.0;
            first.1 += if same { next.1 } else { 0.0 };
            same
        });
        biases
    }

    /// Checks every field against its rule.
    pub fn validate(&self, limits: &ParamLimits) -> Result<(), ParamError> {
        self.validate_counts(limits)?;
        self.validate_numbers()?;
        self.validate_ids(limits.vocab_size)?;
        self.validate_strings()?;
        if self.use_beam_search { self.validate_beams() } else { self.validate_no_beams() }
    }

    fn validate_counts(&self, limits: &ParamLimits) -> Result<(), ParamError> {
        let rule = format!("from 1 to {MAX_N}");
        check((1..=MAX_N).contains(&self.n), "n", rule, self.n)?;
        let several = !self.is_greedy() || self.use_beam_search;
        check(self.n == 1 || several, "n", "1 with temperature 0, but for beams", self.n)?;
        if let Some(max) = self.max_tokens {
            check(max >= 1, "max_tokens", "at least 1", max)?;
            let rule = format!("at most max_tokens ({max})");
            check(self.min_tokens <= max, "min_tokens", rule, self.min_tokens)?;
        }
        let wanted = [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)];
        for (field, n) in wanted {
            let Some(n) = n else { continue };
            let rule = format!("at most {}", limits.max_logprobs);
            // All may exceed what is asked for by number, but not what the engine allows.
            let count = match n {
                NumLogprobs::Top(n) => n,
                NumLogprobs::All => limits.vocab_size as u32,
            };
            check(count <= limits.max_logprobs, field, rule, n)?;
        }
        Ok(())
    }

    fn validate_numbers(&self) -> Result<(), ParamError> {
        for (field, x) in [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ] {
            check((-2.0..=2.0).contains(&x), field, "in [-2, 2]", x)?;
        }
        let r = self.repetition_penalty;
        check(r > 0.0 && r.is_finite(), "repetition_penalty", "finite and above 0", r)?;
        let t = self.temperature;
        check(t.is_finite() && t >= 0.0, "temperature", "finite and at least 0", t)?;
        let p = self.top_p;
        let top_p_ok = (p > 0.0 && p <= 1.0) || (p == 0.0 && self.is_greedy());
        check(top_p_ok, "top_p", "in (0, 1] (0 only with temperature 0)", p)?;
        check((0.0..=1.0).contains(&self.min_p), "min_p", "in [0, 1]", self.min_p)
    }

    fn validate_ids(&self, vocab_size: usize) -> Result<(), ParamError> {
        let in_vocab = |field, ids: &mut dyn Iterator<Item = u32>| {
            let bad = |&(i, id): &(usize, u32)| i >= vocab_size || id as usize >= vocab_size;
            match ids.enumerate().find(bad) {
                None => Ok(()),
                Some((i, _)) if i >= vocab_size => {
                    check(false, field, format!("at most {vocab_size} ids"), "more")
                }
                Some((_, id)) => {
                    check(false, field, format!("below the vocabulary size {vocab_size}"), id)
                }
            }
        };
        in_vocab("stop_token_ids", &mut self.stop_token_ids.iter().copied())?;
        if let Some(allowed) = &self.allowed_token_ids {
            check(!allowed.is_empty(), "allowed_token_ids", "non-empty", "[]")?;
            in_vocab("allowed_token_ids", &mut allowed.iter().copied())?;
        }
        in_vocab("logit_bias", &mut self.logit_bias.iter().map(|&(id, _)| id))?;
        for &(id, bias) in &self.logit_bias {
            check(!bias.is_nan(), "logit_bias", format!("a number for token {id}"), bias)?;
        }
        Ok(())
    }

    fn validate_strings(&self) -> Result<(), ParamError> {
        use crate::text::{MAX_STOP_BYTES, MAX_STOP_STRINGS};
        let n = self.stop.len();
        check(n <= MAX_STOP_STRINGS, "stop", format!("at most {MAX_STOP_STRINGS} strings"), n)?;
        let shown = self.detokenize || self.stop.is_empty();
        check(shown, "stop", "empty with detokenize false", format!("{n} strings"))?;
        check(self.stop.iter().all(|s| !s.is_empty()), "stop", "without empty strings", "\"\"")?;
        let bytes: usize = self.stop.iter().map(String::len).sum();
        let rule = format!("at most {MAX_STOP_BYTES} bytes together");
        check(bytes <= MAX_STOP_BYTES, "stop", rule, format!("{bytes} bytes"))?;
        let n = self.bad_words.len();
        check(n <= MAX_BAD_WORDS, "bad_words", format!("at most {MAX_BAD_WORDS} strings"), n)?;
        for word in &self.bad_words {
            check(!word.trim().is_empty(), "bad_words", "without empty strings", "\"\"")?;
            let rule = format!("at most {MAX_BAD_WORD_BYTES} bytes a string");
            let bytes = word.len();
            check(bytes <= MAX_BAD_WORD_BYTES, "bad_words", rule, format!("{bytes} bytes"))?;
        }
        let Some(salt) = &self.cache_salt else { return Ok(()) };
        let rule = format!("1 to {MAX_CACHE_SALT_BYTES} bytes");
        let bytes = salt.len();
        let in_range = (1..=MAX_CACHE_SALT_BYTES).contains(&bytes);
        check(in_range, "cache_salt", rule, format!("{bytes} bytes"))
    }

    fn validate_no_beams(&self) -> Result<(), ParamError> {
        if let Some(width) = self.beam_width {
            check(false, "beam_width", "unset without use_beam_search", width)?;
        }
        let x = self.length_penalty;
        check(x == 1.0, "length_penalty", "1 without use_beam_search", x)?;
        let mode = self.early_stopping;
        let is_default = mode == EarlyStopping::default();
        check(is_default, "early_stopping", "false without use_beam_search", mode)
    }

    fn validate_beams(&self) -> Result<(), ParamError> {
        let t = self.temperature;
        check(self.is_greedy(), "temperature", "0 with use_beam_search (nothing is drawn)", t)?;
        let rule = format!("at most {MAX_BEAM_WIDTH} with use_beam_search");
        check(self.n <= MAX_BEAM_WIDTH, "n", rule, self.n)?;
        let width = self.effective_beam_width();
        let rule = format!("from n ({}) to {MAX_BEAM_WIDTH}", self.n);
        check((self.n..=MAX_BEAM_WIDTH).contains(&width), "beam_width", rule, width)?;
        let x = self.length_penalty;
        check(x.is_finite(), "length_penalty", "finite", x)?;
        let ids = self.stop_token_ids.len();
        let rule = format!("at most {MAX_BEAM_STOP_IDS} ids with use_beam_search");
        check(ids <= MAX_BEAM_STOP_IDS, "stop_token_ids", rule, ids)?;
        self.validate_beam_scores()?;
        let n = self.stop.len();
        let rule = "empty with use_beam_search (a beam ends at a token, not within a text)";
        check(n == 0, "stop", rule, format!("{n} strings"))?;
        for (field, wanted) in
            [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)]
        {
            let Some(n) = wanted else { continue };
            let rule = "unset with use_beam_search (a search reports scores of sequences)";
            check(false, field, rule, n)?;
        }
        Ok(())
    }

    /// What changes the model's own probabilities, which are what beams are compared by.
    fn validate_beam_scores(&self) -> Result<(), ParamError> {
        let refused = |ok, field, neutral: &str, value: &dyn Display| {
            let rule = format!(
                "{neutral} with use_beam_search (beams are compared by the model's own \
                 probabilities)"
            );
            check(ok, field, rule, value)
        };
        let x = self.presence_penalty;
        refused(x == 0.0, "presence_penalty", "0", &x)?;
        let x = self.frequency_penalty;
        refused(x == 0.0, "frequency_penalty", "0", &x)?;
        let x = self.repetition_penalty;
        refused(x == 1.0, "repetition_penalty", "1", &x)?;
        let n = self.min_tokens;
        refused(n == 0, "min_tokens", "0", &n)?;
        let n = self.logit_bias.len();
        refused(n == 0, "logit_bias", "empty", &format!("{n} ids"))?;
        let n = self.bad_words.len();
        refused(n == 0, "bad_words", "empty", &format!("{n} strings"))?;
        if let Some(ids) = &self.allowed_token_ids {
            refused(false, "allowed_token_ids", "unset", &format!("{} ids", ids.len()))?;
        }
        if let Some(name) = &self.logits_processor {
            refused(false, "logits_processor", "unset", &format!("{name:?}"))?;
        }
        Ok(())
    }
}
