//! Rotary position embedding: its frequencies, and how they are stretched for long contexts.
//!
//! Formulas are those of transformers (`modeling_rope_utils`). Where those depend on the length of
//! the sequence at hand, the cache would hold keys of several rotations; here one set of
//! frequencies serves a whole engine: [`RopeScaling::Dynamic`] always has those of the longest
//! context, and [`RopeScaling::LongRope`] chooses by the context length the engine is set up for.
//! Both are what vLLM does.

use std::f64::consts::PI;

/// Rotary position embedding of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// Base of the frequencies.
    pub theta: f64,
    /// Leading elements of a head that are rotated; even, at most `head_dim`.
    pub rot_dim: usize,
    /// Pairs are `(2i, 2i + 1)`; otherwise `(i, i + rot_dim / 2)`.
    pub interleaved: bool,
    /// Change of the frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// How a model stretches its rotary frequencies.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Plain `theta^(-2i / rot_dim)`.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// NTK-aware: a larger `theta`, so that low frequencies stretch and high ones stay. The base is
    /// that of a sequence of `factor` times the original context.
    Dynamic {
        /// How many times longer the context is.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a linear ramp between
    /// (`_compute_llama3_parameters` in transformers).
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths over `original_max_position_embeddings / low_freq_factor` are scaled.
        low_freq_factor: f64,
        /// Wavelengths under `original_max_position_embeddings / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of the unscaled model, in tokens.
        original_max_position_embeddings: usize,
    },
    /// YaRN.
    Yarn(Yarn),
    /// LongRoPE.
    LongRope(LongRope),
    /// One divisor for each of the `rot_dim / 2` frequencies, as GGUF files store Llama 3's.
    Factors(Vec<f32>),
}

/// YaRN (arXiv 2309.00071): frequencies with few turns in the original context divided by `factor`,
/// those with many kept, a linear ramp over the dimensions between, and attention made sharper.
#[derive(Debug, Clone, PartialEq)]
pub struct Yarn {
    /// How many times longer the context is.
    pub factor: f64,
    /// Context length of the unscaled model, in tokens.
    pub original_max_position_embeddings: usize,
    /// Turns from which a frequency is kept.
    pub beta_fast: f64,
    /// Turns up to which a frequency is divided.
    pub beta_slow: f64,
    /// Whether the ramp starts and ends at whole dimensions.
    pub truncate: bool,
    /// Multiplies cosines and sines; [`yarn_attention_factor`] unless the model has its own.
    pub attention_factor: f64,
}

/// LongRoPE (arXiv 2402.13753): a divisor for each frequency, of which there are two sets.
#[derive(Debug, Clone, PartialEq)]
pub struct LongRope {
    /// Divisors for contexts up to the original length, `rot_dim / 2` of them.
    pub short_factor: Vec<f32>,
    /// Divisors for longer contexts, `rot_dim / 2` of them.
    pub long_factor: Vec<f32>,
    /// Context length of the unscaled model, in tokens.
    pub original_max_position_embeddings: usize,
    /// Multiplies cosines and sines, whichever set is in use.
    pub attention_factor: f64,
}

/// YaRN's `0.1 · ln(factor) + 1`; with `mscales` the ratio of that with the first and the second of
/// them before the logarithm.
pub fn yarn_attention_factor(factor: f64, mscales: Option<(f64, f64)>) -> f64 {
    let of = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    mscales.map_or_else(|| of(1.0), |(mscale, all_dim)| of(mscale) / of(all_dim))
}

impl RopeScaling {
    /// The longest context in tokens of a model whose config says `max_position_embeddings`: linear
    /// and dynamic scaling are given relative to that, YaRN to its own original length. Saturates.
    pub fn stretched(&self, max_position_embeddings: usize) -> usize {
        let times = |len: usize, factor: f64| (len as f64 * factor) as usize;
        match self {
            Self::Linear { factor } | Self::Dynamic { factor } => {
                times(max_position_embeddings, *factor)
            }
            Self::Yarn(yarn) => {
                let stretched = times(yarn.original_max_position_embeddings, yarn.factor);
                stretched.max(max_position_embeddings)
            }
            Self::None | Self::Llama3 { .. } | Self::LongRope(_) | Self::Factors(_) => {
                max_position_embeddings
            }
        }
    }
}

impl RopeSpec {
    /// The `rot_dim / 2` angles per position, in radians, scaling applied, for an engine whose
    /// sequences have up to `context_len` tokens.
    pub fn inv_freq(&self, context_len: usize) -> Vec<f64> {
        match &self.scaling {
            RopeScaling::None => self.plain(self.theta),
            RopeScaling::Linear { factor } => {
                self.plain(self.theta).into_iter().map(|freq| freq / factor).collect()
            }
            RopeScaling::Dynamic { factor } => {
                // transformers' base for a sequence of `factor` times the original length.
                let stretch = factor * factor - (factor - 1.0);
                let dim = self.rot_dim as f64;
                self.plain(self.theta * stretch.powf(dim / (dim - 2.0)))
            }
            RopeScaling::Factors(factors) => self.divided(factors),
            RopeScaling::LongRope(long) => {
                let is_long = context_len > long.original_max_position_embeddings;
                self.divided(if is_long { &long.long_factor } else { &long.short_factor })
            }
            RopeScaling::Yarn(yarn) => self.yarn(yarn),
            &RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let context = original_max_position_embeddings as f64;
                let scaled = self.plain(self.theta).into_iter().map(|freq| {
                    let turns = context * freq / (2.0 * PI);
                    let ramp = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    let kept = ramp.clamp(0.0, 1.0);
                    (1.0 - kept) * freq / factor + kept * freq
                });
                scaled.collect()
            }
        }
    }

    /// What cosines and sines are multiplied by, so that attention scores change by its square.
    pub fn attention_factor(&self) -> f64 {
        match &self.scaling {
            RopeScaling::Yarn(yarn) => yarn.attention_factor,
            RopeScaling::LongRope(long) => long.attention_factor,
            _ => 1.0,
        }
    }

    fn plain(&self, theta: f64) -> Vec<f64> {
        let exponent = |i: usize| -((2 * i) as f64) / self.rot_dim as f64;
        (0..self.rot_dim / 2).map(|i| theta.powf(exponent(i))).collect()
    }

    fn divided(&self, factors: &[f32]) -> Vec<f64> {
        let plain = self.plain(self.theta).into_iter();
        plain.zip(factors).map(|(freq, &factor)| freq / f64::from(factor)).collect()
    }

    fn yarn(&self, yarn: &Yarn) -> Vec<f64> {
        let dim = self.rot_dim as f64;
        let context = yarn.original_max_position_embeddings as f64;
        // The dimension whose frequency makes this many turns within the original context.
        let dimension =
            |turns: f64| dim * (context / (turns * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
        let (mut low, mut high) = (dimension(yarn.beta_fast), dimension(yarn.beta_slow));
        if yarn.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        let plain = self.plain(self.theta).into_iter().enumerate();
        plain
            .map(|(i, freq)| {
                let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                divided * freq / yarn.factor + (1.0 - divided) * freq
            })
            .collect()
    }

    /// Says what is wrong, if anything, for heads of `head_dim` elements.
    pub(super) fn check(&self, head_dim: usize) -> Result<(), String> {
        if !(self.theta.is_finite() && self.theta > 1.0) {
            return Err(format!("rope_theta is {}; it must be finite and over 1", self.theta));
        }
        if self.rot_dim == 0 || !self.rot_dim.is_multiple_of(2) || self.rot_dim > head_dim {
            return Err(format!(
                "the rotary dimension is {}; it must be even, at least 2 and at most head_dim \
                 {head_dim}",
                self.rot_dim
            ));
        }
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => check_factor("linear", *factor),
            RopeScaling::Dynamic { factor } => {
                if self.rot_dim == 2 {
                    return Err("dynamic rope scaling takes a rotary dimension over 2".into());
                }
                check_factor("dynamic", *factor)
            }
            RopeScaling::Yarn(yarn) => yarn.check(),
            RopeScaling::LongRope(long) => long.check(self.rot_dim / 2),
            RopeScaling::Factors(factors) => check_factors("rope", factors, self.rot_dim / 2),
            &RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                check_factor("llama3", factor)?;
                let good = low_freq_factor > 0.0
                    && high_freq_factor.is_finite()
                    && high_freq_factor > low_freq_factor
                    && original_max_position_embeddings >= 1;
                let found = || {
                    format!(
                        "llama3 rope scaling has low_freq_factor {low_freq_factor}, \
                         high_freq_factor {high_freq_factor}; it needs 0 < low < high"
                    )
                };
                good.then_some(()).ok_or_else(found)
            }
        }
    }
}

impl Yarn {
    fn check(&self) -> Result<(), String> {
        check_factor("yarn", self.factor)?;
        let Self { beta_fast, beta_slow, .. } = *self;
        if !(beta_slow > 0.0 && beta_fast >= beta_slow && beta_fast.is_finite()) {
            return Err(format!(
                "yarn rope scaling has beta_fast {beta_fast}, beta_slow {beta_slow}; it needs 0 < \
                 slow <= fast"
            ));
        }
        if self.original_max_position_embeddings == 0 {
            return Err("yarn rope scaling has original_max_position_embeddings 0".into());
        }
        check_attention_factor(self.attention_factor)
    }
}

impl LongRope {
    fn check(&self, len: usize) -> Result<(), String> {
        check_factors("short_factor", &self.short_factor, len)?;
        check_factors("long_factor", &self.long_factor, len)?;
        check_attention_factor(self.attention_factor)
    }
}

fn check_factor(kind: &str, factor: f64) -> Result<(), String> {
    if factor.is_finite() && factor >= 1.0 {
        return Ok(());
    }
    Err(format!("{kind} rope scaling has factor {factor}; it must be finite and at least 1"))
}

fn check_attention_factor(factor: f64) -> Result<(), String> {
    if factor.is_finite() && factor > 0.0 {
        return Ok(());
    }
    Err(format!("the rope attention factor is {factor}; it must be finite and over 0"))
}

fn check_factors(name: &str, factors: &[f32], expected: usize) -> Result<(), String> {
    if factors.len() != expected {
        return Err(format!("there are {} {name} factors; it takes {expected}", factors.len()));
    }
    match factors.iter().position(|f| !(f.is_finite() && *f > 0.0)) {
        Some(i) => {
            Err(format!("{name} factor {i} is {}; it must be finite and over 0", factors[i]))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: usize = 4096;

    fn rope(scaling: RopeScaling) -> RopeSpec {
        RopeSpec { theta: 10000.0, rot_dim: 8, interleaved: false, scaling }
    }

    #[test]
    fn plain_frequencies_are_powers_of_theta() {
        let expected = [1.0, 0.1, 0.01, 0.001];
        for (freq, expected) in rope(RopeScaling::None).inv_freq(CONTEXT).into_iter().zip(expected)
        {
            assert!((freq - expected).abs() < 1e-15, "{freq} {expected}");
        }
    }

    #[test]
    fn llama3_keeps_high_divides_low_and_blends_between() {
        let scaled = rope(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 128,
        })
        .inv_freq(CONTEXT);
        // Turns within 128 positions: 20.4, 2.04, 0.2, 0.02.
        let turns = 128.0 * 0.1 / (2.0 * PI);
        let kept = (turns - 1.0) / 3.0;
        let expected = [1.0, (1.0 - kept) * 0.1 / 8.0 + kept * 0.1, 0.01 / 8.0, 0.001 / 8.0];
        for (freq, expected) in scaled.into_iter().zip(expected) {
            assert!((freq - expected).abs() < 1e-15, "{freq} {expected}");
        }
    }

    #[test]
    fn factors_divide_each_frequency() {
        let scaled = rope(RopeScaling::Factors(vec![1.0, 2.0, 4.0, 8.0])).inv_freq(CONTEXT);
        let plain = rope(RopeScaling::None).inv_freq(CONTEXT);
        for (i, (scaled, plain)) in scaled.into_iter().zip(plain).enumerate() {
            assert_eq!(scaled * f64::from(1 << i), plain);
        }
    }

    #[test]
    fn longrope_chooses_by_the_context_length() {
        let long = rope(RopeScaling::LongRope(LongRope {
            short_factor: vec![1.0; 4],
            long_factor: vec![2.0; 4],
            original_max_position_embeddings: 64,
            attention_factor: 1.25,
        }));
        let plain = rope(RopeScaling::None).inv_freq(CONTEXT);
        assert_eq!(long.inv_freq(64), plain);
        assert_eq!(long.inv_freq(65), plain.iter().map(|freq| freq / 2.0).collect::<Vec<_>>());
        assert_eq!(long.attention_factor(), 1.25);
    }

    #[test]
    fn contexts_stretch_with_the_scaling() {
        let yarn = |factor| {
            RopeScaling::Yarn(Yarn {
                factor,
                original_max_position_embeddings: 100,
                beta_fast: 32.0,
                beta_slow: 1.0,
                truncate: true,
                attention_factor: 1.0,
            })
        };
        assert_eq!(RopeScaling::None.stretched(100), 100);
        assert_eq!(RopeScaling::Linear { factor: 2.5 }.stretched(100), 250);
        assert_eq!(RopeScaling::Dynamic { factor: 4.0 }.stretched(100), 400);
        assert_eq!(RopeScaling::Dynamic { factor: 1e300 }.stretched(100), usize::MAX);
        assert_eq!(yarn(4.0).stretched(100), 400);
        assert_eq!(yarn(4.0).stretched(400), 400);
        assert_eq!(yarn(2.0).stretched(400), 400);
    }

    #[test]
    fn bad_rope_is_refused_with_its_value() {
        let message = |rope: RopeSpec| rope.check(64).unwrap_err();
        let plain = rope(RopeScaling::None);
        assert!(message(RopeSpec { theta: f64::NAN, ..plain.clone() }).contains("NaN"));
        assert!(message(RopeSpec { rot_dim: 66, ..plain.clone() }).contains("66"));
        assert!(message(RopeSpec { rot_dim: 7, ..plain.clone() }).contains('7'));
        assert!(message(rope(RopeScaling::Factors(vec![1.0; 3]))).contains("takes 4"));
        let zero = rope(RopeScaling::Factors(vec![1.0, 0.0, 1.0, 1.0]));
        assert!(message(zero).contains("factor 1 is 0"));
        assert!(message(rope(RopeScaling::Linear { factor: 0.5 })).contains("linear"));
        assert!(message(rope(RopeScaling::Dynamic { factor: f64::INFINITY })).contains("inf"));
        let pair = RopeSpec { rot_dim: 2, ..rope(RopeScaling::Dynamic { factor: 2.0 }) };
        assert!(message(pair).contains("over 2"));
        assert_eq!(plain.check(64), Ok(()));
    }
}
