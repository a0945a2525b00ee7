//! Sampling defaults from `generation_config.json`.

use super::json::JsonFile;
use crate::{error::LoadError, spec::MAX_POSITIONS};

/// Sampling parameters a model's publisher recommends; `None` where the file does not say. A value
/// in the file is kept even if it is zero. Ranges are checked where requests are.
///
/// `do_sample: false` means greedy decoding: the temperature is then 0 whatever the file says, and
/// top_p, top_k and min_p, which have no part in it, are unset.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Softmax temperature.
    pub temperature: Option<f32>,
    /// Nucleus mass.
    pub top_p: Option<f32>,
    /// Number of tokens kept; 0 or −1 keeps all.
    pub top_k: Option<i64>,
    /// Least probability relative to the most probable token.
    pub min_p: Option<f32>,
    /// Divisor of the logits of tokens seen before.
    pub repetition_penalty: Option<f32>,
    /// Most tokens to generate.
    pub max_new_tokens: Option<usize>,
}

impl GenerationDefaults {
    pub(super) fn read(file: &JsonFile) -> Result<Self, LoadError> {
        let float = |key| Ok(file.float(key)?.map(|value| value as f32));
        let defaults = Self {
            temperature: float("temperature")?,
            top_p: float("top_p")?,
            top_k: top_k(file)?,
            min_p: float("min_p")?,
            repetition_penalty: float("repetition_penalty")?,
            max_new_tokens: file.count("max_new_tokens", 1..=MAX_POSITIONS)?,
        };
        match file.flag("do_sample")? {
            Some(false) => {
                let temperature = Some(0.0);
                Ok(Self { temperature, top_p: None, top_k: None, min_p: None, ..defaults })
            }
            None | Some(true) => Ok(defaults),
        }
    }
}

fn top_k(file: &JsonFile) -> Result<Option<i64>, LoadError> {
    let Some(value) = file.get("top_k") else { return Ok(None) };
    match value.as_i64() {
        Some(top_k) => Ok(Some(top_k)),
        None => Err(file.error("top_k", "must be a whole number")),
    }
}
