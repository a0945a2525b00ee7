//! Hugging Face configs: `config.json` and `generation_config.json` to a [`DecoderSpec`].
//!
//! One file a family, one line a family in `FAMILIES`. Defaults for absent keys are those of the
//! family's configuration class in transformers. Both generations of key names are read
//! (`torch_dtype` and `dtype`; `rope_scaling` and `rope_parameters`); what is not implemented is
//! refused by name rather than ignored.

mod decoder;
mod generation;
mod json;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;
mod rope;

use std::path::Path;

pub use generation::GenerationDefaults;

use crate::{error::LoadError, folder::ModelFolder, spec::DecoderSpec};
use json::JsonFile;

/// Longest config file, in bytes.
pub const MAX_CONFIG_BYTES: u64 = 16 << 20;

const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";

type ReadSpec = fn(&JsonFile) -> Result<DecoderSpec, LoadError>;

/// Every known architecture, by its name in `architectures`, and what reads its config.
const FAMILIES: &[(&str, ReadSpec)] = &[
    ("LlamaForCausalLM", llama::read_spec),
    ("MistralForCausalLM", mistral::read_spec),
    ("Qwen2ForCausalLM", qwen2::read_spec),
    ("Qwen3ForCausalLM", qwen3::read_spec),
];

/// What the configs of a model folder say.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The model itself.
    pub spec: DecoderSpec,
    /// Sampling parameters the model's publisher recommends.
    pub generation: GenerationDefaults,
}

/// Names of the architectures that can be loaded.
pub fn supported_architectures() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|(name, _)| *name)
}

/// Reads `config.json` and, where there is one, `generation_config.json` of a model folder.
///
/// # Errors
/// `config.json` is missing; a file is over [`MAX_CONFIG_BYTES`] or not a JSON object; a key is
/// missing, of the wrong type or out of range; the architecture, rope kind, activation or
/// quantisation is not supported.
pub fn read_config(dir: &Path) -> Result<ModelConfig, LoadError> {
    let folder = ModelFolder::open(dir)?;
    let Some(config) = folder.read_text(CONFIG, MAX_CONFIG_BYTES)? else {
        return Err(LoadError::malformed(dir, format!("holds no {CONFIG}")));
    };
    let generation = folder.read_text(GENERATION_CONFIG, MAX_CONFIG_BYTES)?;
    parse_config(dir, &config, generation.as_deref())
}

/// Reads the texts of `config.json` and `generation_config.json`; `dir` is the folder that messages
/// say they come from.
///
/// # Errors
/// Those of [`read_config`] that concern contents.
pub fn parse_config(
    dir: &Path,
    config: &str,
    generation: Option<&str>,
) -> Result<ModelConfig, LoadError> {
    let config = JsonFile::parse(&dir.join(CONFIG), config)?;
    let generation =
        generation.map(|text| JsonFile::parse(&dir.join(GENERATION_CONFIG), text)).transpose()?;
    parse(&config, generation.as_ref())
}

fn parse(config: &JsonFile, generation: Option<&JsonFile>) -> Result<ModelConfig, LoadError> {
    let architecture = config.architecture()?;
    let Some((_, read_spec)) = FAMILIES.iter().find(|(name, _)| *name == architecture) else {
        return Err(LoadError::unsupported(config.path(), "architecture", architecture));
    };
    if let Some(quantisation) = config.object("quantization_config")? {
        let scheme = quantisation.string("quant_method")?.unwrap_or("without quant_method");
        return Err(LoadError::unsupported(config.path(), "quantisation scheme", scheme));
    }
    let mut spec = read_spec(config)?;
    if let Some(generation) = generation {
        for id in generation.token_ids("eos_token_id")? {
            if !spec.eos.contains(&id) {
                spec.eos.push(id);
            }
        }
        // Names the file, where the spec's own check would blame config.json.
        spec.check(generation.path())?;
    }
    let generation = generation.map(GenerationDefaults::read).transpose()?.unwrap_or_default();
    Ok(ModelConfig { spec, generation })
}

#[cfg(test)]
pub(crate) use tests::{GOLDENS, golden_folder};

#[cfg(test)]
mod tests;
