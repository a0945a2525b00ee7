//! Rotary embedding keys, in the spellings of transformers 4 and 5.
//!
//! Version 4: `rope_theta` beside `rope_scaling: {type | rope_type, …}`. Version 5:
//! `rope_parameters: {rope_theta, rope_type, …}`; it still lets `rope_scaling` win where both are
//! there, and so does this.

use super::json::JsonFile;
use crate::{
    error::LoadError,
    spec::{MAX_POSITIONS, RopeScaling, RopeSpec},
};

/// transformers' default for every family here.
const DEFAULT_THETA: f64 = 10000.0;

pub(super) fn read_rope(config: &JsonFile, head_dim: usize) -> Result<RopeSpec, LoadError> {
    let parameters = config.object("rope_parameters")?;
    let scaling = config.object("rope_scaling")?.filter(|scaling| !scaling.is_empty());
    let mut theta = None;
    for object in [scaling.as_ref(), parameters.as_ref(), Some(config)].into_iter().flatten() {
        check_full_rotation(object)?;
        theta = theta.or(object.float("rope_theta")?);
    }
    let scaling = match scaling.or(parameters) {
        Some(object) => read_scaling(&object)?,
        None => RopeScaling::None,
    };
    let theta = theta.unwrap_or(DEFAULT_THETA);
    Ok(RopeSpec { theta, rot_dim: head_dim, interleaved: false, scaling })
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

fn read_scaling(object: &JsonFile) -> Result<RopeScaling, LoadError> {
    let kind = match (object.string("rope_type")?, object.string("type")?) {
        (Some(new), Some(old)) if new != old => {
            let problem = format!("is `{new}`, and type is `{old}`; they must agree");
            return Err(object.error("rope_type", problem));
        }
        (Some(kind), _) | (None, Some(kind)) => kind,
        (None, None) if object.has("factor") => {
            return Err(object.error("rope_type", "is missing beside factor"));
        }
        (None, None) => "default",
    };
    match kind {
        "default" => Ok(RopeScaling::None),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: object.required_float("factor")?,
            low_freq_factor: object.required_float("low_freq_factor")?,
            high_freq_factor: object.required_float("high_freq_factor")?,
            original_max_position_embeddings: object
                .required_count("original_max_position_embeddings", MAX_POSITIONS)?,
        }),
        unknown => Err(LoadError::unsupported(object.path(), "rope type", unknown)),
    }
}
