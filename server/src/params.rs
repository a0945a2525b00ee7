//! Sampling parameters: the engine's defaults, over them what the model's publisher recommends,
//! over that the flags.

use anyhow::Context;
use quire_engine::SamplingParams;
use quire_engine::sampling::ParamLimits;
use quire_model_zoo::config::GenerationDefaults;
use std::path::Path;

/// The engine's defaults, over them what the model's publisher recommends.
///
/// # Errors
/// The recommendation cannot be followed; the message names its file.
pub fn recommended(file: &GenerationDefaults, model: &Path) -> anyhow::Result<SamplingParams> {
    let mut params = SamplingParams::default();
    params.temperature = file.temperature.unwrap_or(params.temperature);
    params.top_p = file.top_p.unwrap_or(params.top_p);
    params.min_p = file.min_p.unwrap_or(params.min_p);
    params.top_k = match file.top_k {
        None | Some(-1) => 0,
        Some(k) => u32::try_from(k).with_context(|| {
            let path = generation_config(model);
            format!("{path}: top_k is {k}; it must be -1 to {}", u32::MAX)
        })?,
    };
    params.repetition_penalty = file.repetition_penalty.unwrap_or(params.repetition_penalty);
    Ok(params)
}

/// Checks `params`, which the flags made of `recommended`.
///
/// # Errors
/// A parameter is outside its rule; where the model is to blame, the message names its file.
pub fn check(
    params: &SamplingParams,
    recommended: &SamplingParams,
    limits: &ParamLimits,
    model: &Path,
) -> anyhow::Result<()> {
    let Err(error) = params.validate(limits) else { return Ok(()) };
    // Flags are not to blame for what is wrong without them.
    let of_file = recommended.validate(limits).is_err_and(|other| other == error);
    let error = anyhow::Error::from(error);
    Err(if of_file { error.context(generation_config(model)) } else { error })
}

/// The path of the file with the publisher's recommendations, to be shown.
fn generation_config(model: &Path) -> String {
    model.join("generation_config.json").display().to_string()
}
