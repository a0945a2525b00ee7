//! Latencies of any number of requests, in a fixed amount of memory.
//!
//! Microseconds are counted in bins: one each below 256, above that 128 in each power of two, so
//! that a percentile is off by less than 1 in 256. The mean is exact.

use serde::Serialize;
use std::time::Duration;

/// Bits of a value that its bin keeps.
const BITS: u32 = 8;

/// Latencies as they come.
#[derive(Debug, Default)]
pub struct Latencies {
    /// Number of values in each bin; as long as the largest value needs.
    bins: Vec<u64>,
    count: u64,
    sum_us: u128,
}

/// Mean and percentiles, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    /// Mean.
    pub mean: f64,
    /// The smallest value that at least half of them do not exceed (nearest rank).
    pub p50: f64,
    /// The same for 99 of 100.
    pub p99: f64,
}

impl Latencies {
    /// Counts one.
    pub fn add(&mut self, latency: Duration) {
        let us = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        let bin = bin(us);
        if bin >= self.bins.len() {
            self.bins.resize(bin + 1, 0);
        }
        self.bins[bin] += 1;
        self.count += 1;
        self.sum_us += u128::from(us);
    }

    /// `None` of nothing.
    pub fn summary(&self) -> Option<Latency> {
        Some(Latency {
            mean: self.sum_us as f64 / self.count as f64 / 1e3,
            p50: self.percentile_us(50)? / 1e3,
            p99: self.percentile_us(99)? / 1e3,
        })
    }

    fn percentile_us(&self, percent: u64) -> Option<f64> {
        let rank = (self.count * percent).div_ceil(100);
        let mut seen = 0;
        let bin = self.bins.iter().position(|count| {
            seen += count;
            *count > 0 && seen >= rank
        });
        bin.map(middle_us)
    }
}

/// The bin of a value.
fn bin(us: u64) -> usize {
    // Bits that are dropped; the rest has BITS of them, the highest being 1 where any is dropped.
    let dropped = (u64::BITS - us.leading_zeros()).saturating_sub(BITS);
    ((u64::from(dropped) << (BITS - 1)) + (us >> dropped)) as usize
}

/// The middle of the values in a bin.
fn middle_us(bin: usize) -> f64 {
    let dropped = (bin >> (BITS - 1)).saturating_sub(1);
    let kept = bin - (dropped << (BITS - 1));
    let width = 2f64.powi(dropped as i32);
    kept as f64 * width + (width - 1.0) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values_us: impl IntoIterator<Item = u64>) -> Option<Latency> {
        let mut latencies = Latencies::default();
        values_us.into_iter().for_each(|us| latencies.add(Duration::from_micros(us)));
        latencies.summary()
    }

    #[test]
    fn percentiles_are_the_nearest_rank() {
        assert_eq!(of([]), None);
        for (values, p50, p99) in [
            (1..=100, 0.050, 0.099),
            (1..=1, 0.001, 0.001),
            (1..=2, 0.001, 0.002),
            (1..=3, 0.002, 0.003),
            (0..=0, 0.0, 0.0),
        ] {
            let latency = of(values.clone()).unwrap();
            assert_eq!((latency.p50, latency.p99), (p50, p99), "{values:?}");
        }
        let latency = of([3000, 1000, 8000]).unwrap();
        assert_eq!(latency.mean, 4.0);
        assert!((latency.p50 - 3.0).abs() < 3.0 / 256.0, "{latency:?}");
    }

    #[test]
    fn bins_are_in_order_and_narrow() {
        for us in (0..5000).chain((12..64).flat_map(|n| [(1 << n) - 1, 1 << n, 3 << (n - 2)])) {
            let middle = middle_us(bin(us));
            assert!((middle - us as f64).abs() <= us as f64 / 256.0, "{us}: {middle}");
        }
        for us in 0..5000 {
            assert!((bin(us)..=bin(us) + 1).contains(&bin(us + 1)), "{us}");
        }
        assert!(bin(u64::MAX) < 1 << 13);
    }
}
