//! Formats of quantised weights.

use std::fmt;

/// A format of quantised blocks that files hold and a backend may multiply as they are. The layouts
/// are those of GGUF.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockFormat {
    /// 32 elements: f16 scale, 32 signed bytes.
    Q8_0,
    /// 32 elements: f16 scale, 4-bit values around 8.
    Q4_0,
    /// 32 elements: f16 scale, f16 minimum, 4-bit values.
    Q4_1,
    /// 256 elements: 4-bit values, eight 6-bit scales and minima, f16 scale, f16 minimum.
    Q4K,
    /// 256 elements: 6-bit values around 32, sixteen 8-bit scales, f16 scale.
    Q6K,
}

/// How many of a model's matrices are kept in which quantised format.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WeightFormats {
    counts: Vec<(&'static str, usize)>,
    matrices: usize,
}

impl WeightFormats {
    /// Counts a matrix; `format` is what users call its quantised format, where it has one.
    pub fn add(&mut self, format: Option<&'static str>) {
        self.matrices += 1;
        let Some(format) = format else { return };
        match self.counts.iter_mut().find(|count| count.0 == format) {
            Some(count) => count.1 += 1,
            None => self.counts.push((format, 1)),
        }
    }

    /// Whether a matrix is quantised.
    pub fn is_quantised(&self) -> bool {
        !self.counts.is_empty()
    }
}

impl fmt::Display for WeightFormats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.counts[..] {
            [] => f.write_str("none"),
            [(format, count)] => write!(f, "{format} ({count} of {} matrices)", self.matrices),
            counts => {
                let counts: Vec<String> =
                    counts.iter().map(|(format, count)| format!("{count} {format}")).collect();
                write!(f, "{} of {} matrices", counts.join(", "), self.matrices)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_counted_by_name() {
        let mut formats = WeightFormats::default();
        formats.add(None);
        assert_eq!((formats.to_string().as_str(), formats.is_quantised()), ("none", false));
        formats.add(Some("Q4_K as stored"));
        formats.add(Some("Q4_K as stored"));
        assert_eq!(formats.to_string(), "Q4_K as stored (2 of 3 matrices)");
        formats.add(Some("Q6_K as stored"));
        let mixed = "2 Q4_K as stored, 1 Q6_K as stored of 4 matrices";
        assert_eq!((formats.to_string().as_str(), formats.is_quantised()), (mixed, true));
    }
}
