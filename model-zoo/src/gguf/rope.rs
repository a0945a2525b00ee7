//! Rotary embedding: keys under `ARCH.rope.` and the tensors that hold frequency divisors.
//!
//! | `rope.scaling.type` | tensors | scaling |
//! | --- | --- | --- |
//! | `none` | | none |
//! | absent, `linear` | | linear by `rope.scaling.factor`, once called `rope.scale_linear` |
//! | `yarn` | | YaRN by `rope.scaling.factor` and `rope.scaling.yarn_*` |
//! | absent, `none` | `rope_freqs` | those divisors: Llama 3's |
//! | absent, `none`, `longrope` | `rope_factors_short`, `rope_factors_long` | LongRoPE |
//!
//! Whatever would change the result beyond that is refused by name.

use super::{GgufFile, names};
use crate::{
    error::LoadError,
    spec::{
        LongRope, MAX_HEAD_DIM, MAX_POSITIONS, RopeScaling, RopeSpec, Yarn, yarn_attention_factor,
    },
};

/// Reads the rotary embedding. `architecture` prefixes the keys; `context_length` is the file's.
pub(super) fn read_rope(
    file: &GgufFile,
    architecture: &str,
    head_dim: usize,
    context_length: usize,
) -> Result<RopeSpec, LoadError> {
    let keys = RopeKeys { file, architecture, context_length };
    let rot_key = keys.name("dimension_count");
    let rot_dim = file.metadata().count(&rot_key, 1..=MAX_HEAD_DIM)?.unwrap_or(head_dim);
    Ok(RopeSpec {
        theta: keys.float("freq_base")?.unwrap_or(10000.0),
        rot_dim,
        // The source undoes the row order that pairs neighbours.
        interleaved: false,
        scaling: keys.scaling(rot_dim / 2)?,
    })
}

struct RopeKeys<'a> {
    file: &'a GgufFile,
    architecture: &'a str,
    context_length: usize,
}

impl RopeKeys<'_> {
    fn name(&self, suffix: &str) -> String {
        format!("{}.rope.{suffix}", self.architecture)
    }

    fn float(&self, suffix: &str) -> Result<Option<f64>, LoadError> {
        self.file.metadata().float(&self.name(suffix))
    }

    /// A float that multiplies something; 1 if absent.
    fn multiplier(&self, suffix: &str) -> Result<f64, LoadError> {
        Ok(self.float(suffix)?.unwrap_or(1.0))
    }

    fn unsupported(&self, name: &str) -> LoadError {
        LoadError::unsupported(&self.file.path, "rope scaling", name)
    }

    /// `len` is the number of frequencies.
    fn scaling(&self, len: usize) -> Result<RopeScaling, LoadError> {
        let metadata = self.file.metadata();
        let stored = self.stored(len)?;
        let kind = metadata.string(&self.name("scaling.type"))?;
        let scaling = match (kind, stored) {
            (None | Some("none"), Some(stored))
            | (Some("longrope"), Some(stored @ RopeScaling::LongRope(_))) => stored,
            (Some("none"), None) => RopeScaling::None,
            (None, None) => match self.factor()? {
                None | Some(1.0) => RopeScaling::None,
                Some(factor) => RopeScaling::Linear { factor },
            },
            (Some("linear"), None) => RopeScaling::Linear { factor: self.required_factor()? },
            (Some("yarn"), None) => RopeScaling::Yarn(self.yarn()?),
            (Some(kind @ ("linear" | "yarn" | "longrope")), stored) => {
                let has = if stored.is_some() { "other" } else { "no" };
                return Err(self.unsupported(&format!("{kind} with {has} divisors in tensors")));
            }
            (Some(kind), _) => return Err(self.unsupported(kind)),
        };
        if !matches!(scaling, RopeScaling::Yarn(_) | RopeScaling::LongRope(_)) {
            self.refuse_attention_factor()?;
        }
        Ok(scaling)
    }

    fn factor(&self) -> Result<Option<f64>, LoadError> {
        Ok(self.float("scaling.factor")?.or(self.float("scale_linear")?))
    }

    fn required_factor(&self) -> Result<f64, LoadError> {
        let missing = || self.file.metadata().missing(&self.name("scaling.factor"));
        self.factor()?.ok_or_else(missing)
    }

    fn original_length(&self) -> Result<usize, LoadError> {
        let key = self.name("scaling.original_context_length");
        let length = self.file.metadata().count(&key, 1..=MAX_POSITIONS)?;
        Ok(length.unwrap_or(self.context_length))
    }

    fn refuse_attention_factor(&self) -> Result<(), LoadError> {
        match self.multiplier("scaling.attn_factor")? {
            1.0 => Ok(()),
            factor => Err(self.unsupported(&format!("attn_factor {factor}"))),
        }
    }

    fn yarn(&self) -> Result<Yarn, LoadError> {
        let log_multiplier = self.float("scaling.yarn_log_multiplier")?.unwrap_or(0.0);
        if log_multiplier != 0.0 {
            return Err(self.unsupported(&format!("yarn_log_multiplier {log_multiplier}")));
        }
        // How far the ramp counts; a negative value stands for the default.
        let extrapolation = self.multiplier("scaling.yarn_ext_factor")?;
        if extrapolation >= 0.0 && extrapolation != 1.0 {
            return Err(self.unsupported(&format!("yarn_ext_factor {extrapolation}")));
        }
        let factor = self.required_factor()?;
        let attention = self.multiplier("scaling.yarn_attn_factor")?
            * self.multiplier("scaling.attn_factor")?;
        Ok(Yarn {
            factor,
            original_max_position_embeddings: self.original_length()?,
            beta_fast: self.float("scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: self.float("scaling.yarn_beta_slow")?.unwrap_or(1.0),
            truncate: true,
            attention_factor: attention * yarn_attention_factor(factor, None),
        })
    }

    /// Scaling that is stored as divisors, if any is.
    fn stored(&self, len: usize) -> Result<Option<RopeScaling>, LoadError> {
        let [freqs, short, long] = names::ROPE_FACTORS.map(|name| self.divisors(name, len));
        match (freqs?, short?, long?) {
            (None, None, None) => Ok(None),
            (Some(factors), None, None) => Ok(Some(RopeScaling::Factors(factors))),
            (None, Some(short_factor), Some(long_factor)) => {
                Ok(Some(RopeScaling::LongRope(LongRope {
                    short_factor,
                    long_factor,
                    original_max_position_embeddings: self.original_length()?,
                    attention_factor: self.multiplier("scaling.attn_factor")?,
                })))
            }
            _ => {
                let [freqs, short, long] = names::ROPE_FACTORS;
                let problem = format!("it must hold {freqs} alone, {short} and {long}, or none");
                Err(LoadError::malformed(&self.file.path, problem))
            }
        }
    }

    fn divisors(&self, name: &str, len: usize) -> Result<Option<Vec<f32>>, LoadError> {
        let Some(tensor) = self.file.tensor(name) else { return Ok(None) };
        let mut divisors = vec![0.0; len];
        self.file.read_row(tensor, 0, &mut divisors)?;
        Ok(Some(divisors))
    }
}
