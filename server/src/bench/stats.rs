//! Mean, spread and percentiles of a handful of values.

use serde::Serialize;
use std::collections::BTreeMap;

/// Mean, standard deviation and percentiles.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Distribution {
    /// Mean.
    pub mean: f64,
    /// Standard deviation of the values themselves.
    pub std: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
}

impl Distribution {
    /// `None` of nothing.
    pub fn of(values: &[f64]) -> Option<Self> {
        let mean = mean(values)?;
        let squares: Vec<f64> = values.iter().map(|x| (x - mean).powi(2)).collect();
        Some(Distribution {
            mean,
            std: self::mean(&squares)?.sqrt(),
            p50: percentile(values, 50.0)?,
            p90: percentile(values, 90.0)?,
            p99: percentile(values, 99.0)?,
        })
    }

    /// Under the names of vLLM's benchmarks, such as `mean_ttft_ms`.
    pub fn named(&self, what: &str, into: &mut BTreeMap<String, f64>) {
        let parts =
            [("mean", self.mean), ("median", self.p50), ("std", self.std), ("p99", self.p99)];
        into.extend(parts.map(|(part, value)| (format!("{part}_{what}_ms"), value)));
    }
}

/// The mean; `None` of nothing.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// A percentile, between neighbours by linear interpolation (as numpy's); `None` of nothing.
pub fn percentile(values: &[f64], percent: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = percent / 100.0 * (sorted.len() as f64 - 1.0);
    let low = *sorted.get(rank.floor() as usize)?;
    let high = *sorted.get(rank.ceil() as usize)?;
    Some(low + (high - low) * rank.fract())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_interpolated() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(percentile(&values, 0.0), Some(1.0));
        assert_eq!(percentile(&values, 50.0), Some(2.5));
        assert_eq!(percentile(&values, 90.0), Some(3.7));
        assert_eq!(percentile(&values, 100.0), Some(4.0));
        assert_eq!(percentile(&[5.0], 99.0), Some(5.0));
        assert_eq!(percentile(&[], 50.0), None);
    }

    #[test]
    fn distributions_have_vllms_names() {
        let of = Distribution::of(&[1.0, 3.0]).unwrap();
        assert_eq!((of.mean, of.p50, of.std), (2.0, 2.0, 1.0));
        let mut named = BTreeMap::new();
        of.named("ttft", &mut named);
        let names: Vec<&str> = named.keys().map(String::as_str).collect();
        assert_eq!(names, ["mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "std_ttft_ms"]);
        assert_eq!(Distribution::of(&[]), None);
    }
}
