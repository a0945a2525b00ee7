//! Rotary embedding keys, in the spellings of transformers 4 and 5.
//!
//! Version 4: `rope_theta` beside `rope_scaling: {type | rope_type, …}`. Version 5:
//! `rope_parameters: {rope_theta, rope_type, …}`; it still lets `rope_scaling` win where both are
//! there, and so does this. Defaults of absent keys are transformers' too.

use super::json::JsonFile;
use crate::{
    error::LoadError,
    spec::{LongRope, MAX_POSITIONS, RopeScaling, RopeSpec, Yarn, yarn_attention_factor},
};

/// transformers' default for every family here.
const DEFAULT_THETA: f64 = 10000.0;

const ORIGINAL_LENGTH: &str = "original_max_position_embeddings";

/// `max_position_embeddings` is the config's, not stretched by the scaling.
pub(super) fn read_rope(
    config: &JsonFile,
    head_dim: usize,
    max_position_embeddings: usize,
) -> Result<RopeSpec, LoadError> {
    let parameters = config.object("rope_parameters")?;
    let scaling = config.object("rope_scaling")?.filter(|scaling| !scaling.is_empty());
    let mut theta = None;
    for object in [scaling.as_ref(), parameters.as_ref(), Some(config)].into_iter().flatten() {
        check_full_rotation(object)?;
        theta = theta.or(object.float("rope_theta")?);
    }
    let scaling = match scaling.or(parameters) {
        Some(object) => {
            // Some models keep the original length beside the scaling; there it wins.
            let outer = config.count(ORIGINAL_LENGTH, 1..=MAX_POSITIONS)?;
            let inner = object.count(ORIGINAL_LENGTH, 1..=MAX_POSITIONS)?;
            let original_max_position_embeddings =
                outer.or(inner).unwrap_or(max_position_embeddings);
            let lengths = Lengths { max_position_embeddings, original_max_position_embeddings };
            read_scaling(&object, &lengths)?
        }
        None => RopeScaling::None,
    };
    let theta = theta.unwrap_or(DEFAULT_THETA);
    Ok(RopeSpec { theta, rot_dim: head_dim, interleaved: false, scaling })
}

/// Context lengths in tokens.
struct Lengths {
    max_position_embeddings: usize,
    original_max_position_embeddings: usize,
}

/// These families rotate the whole head; a config that says otherwise is not theirs.
fn check_full_rotation(object: &JsonFile) -> Result<(), LoadError> {
    match object.float("partial_rotary_factor")? {
        Some(factor) if factor != 1.0 => Err(object.error(
            "partial_rotary_factor",
            format!("is {factor}; this architecture takes only 1"),
        )),
        _ => Ok(()),
    }
}

fn read_scaling(object: &JsonFile, lengths: &Lengths) -> Result<RopeScaling, LoadError> {
    let factor = || object.required_float("factor");
    match kind(object)? {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: factor()? }),
        "dynamic" => {
            refuse_keys(object, &["alpha"])?;
            Ok(RopeScaling::Dynamic { factor: factor()? })
        }
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: factor()?,
            low_freq_factor: object.required_float("low_freq_factor")?,
            high_freq_factor: object.required_float("high_freq_factor")?,
            original_max_position_embeddings: lengths.original_max_position_embeddings,
        }),
        "yarn" => read_yarn(object, lengths).map(RopeScaling::Yarn),
        "longrope" | "su" => read_longrope(object, lengths).map(RopeScaling::LongRope),
        unknown => Err(LoadError::unsupported(object.path(), "rope type", unknown)),
    }
}

fn kind(object: &JsonFile) -> Result<&str, LoadError> {
    match (object.string("rope_type")?, object.string("type")?) {
        (Some(new), Some(old)) if new != old => {
            let problem = format!("is `{new}`, and type is `{old}`; they must agree");
            Err(object.error("rope_type", problem))
        }
        (Some(kind), _) | (None, Some(kind)) => Ok(kind),
        (None, None) if object.has("factor") => {
            Err(object.error("rope_type", "is missing beside factor"))
        }
        (None, None) => match object.first_object() {
            Some(layers) => {
                Err(LoadError::unsupported(object.path(), "rope for each layer type", layers))
            }
            None => Ok("default"),
        },
    }
}

fn read_yarn(object: &JsonFile, lengths: &Lengths) -> Result<Yarn, LoadError> {
    let original_max_position_embeddings = lengths.original_max_position_embeddings;
    let factor = object.float("factor")?.unwrap_or_else(|| lengths.ratio());
    // transformers takes 0 for unset in these four.
    let nonzero = |key| Ok(object.float(key)?.filter(|value| *value != 0.0));
    let mscales = nonzero("mscale")?.zip(nonzero("mscale_all_dim")?);
    Ok(Yarn {
        factor,
        original_max_position_embeddings,
        beta_fast: nonzero("beta_fast")?.unwrap_or(32.0),
        beta_slow: nonzero("beta_slow")?.unwrap_or(1.0),
        truncate: object.flag("truncate")?.unwrap_or(true),
        attention_factor: object
            .float("attention_factor")?
            .unwrap_or_else(|| yarn_attention_factor(factor, mscales)),
    })
}

fn read_longrope(object: &JsonFile, lengths: &Lengths) -> Result<LongRope, LoadError> {
    refuse_keys(object, &["short_mscale", "long_mscale"])?;
    let original_max_position_embeddings = lengths.original_max_position_embeddings;
    let factor = object.float("factor")?.unwrap_or_else(|| lengths.ratio());
    let attention_factor = match object.float("attention_factor")? {
        Some(factor) => factor,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / (original_max_position_embeddings as f64).ln()).sqrt(),
    };
    let factors = |key| {
        let factors = object.floats(key)?.ok_or_else(|| object.missing(key))?;
        Ok(factors.into_iter().map(|factor| factor as f32).collect())
    };
    Ok(LongRope {
        short_factor: factors("short_factor")?,
        long_factor: factors("long_factor")?,
        original_max_position_embeddings,
        attention_factor,
    })
}

impl Lengths {
    /// The scaling factor of a config that gives none.
    fn ratio(&self) -> f64 {
        self.max_position_embeddings as f64 / self.original_max_position_embeddings as f64
    }
}

/// Refuses keys by which some models change the kind's formula.
fn refuse_keys(object: &JsonFile, keys: &[&str]) -> Result<(), LoadError> {
    match keys.iter().find(|key| object.get(key).is_some()) {
        Some(key) => Err(LoadError::unsupported(object.path(), "rope scaling key", key)),
        None => Ok(()),
    }
}
