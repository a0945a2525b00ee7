//! How close steps come to what the machine can do.
//!
//! A step reads the weights it multiplies by and the keys and values of its sequences, and it
//! multiplies. It takes at least the longer of the two times that its bytes and its operations
//! take by themselves; the other one could be hidden behind it.

use super::machine::caches;
use anyhow::Context;
use quire_engine::DType;
use quire_engine::backend::Isa;
use quire_engine::backend::ceiling::{
    Ctx, MatrixKind, Pages, ReadBuffer, matrix_peak, read_bandwidth, usable_cores,
};
use quire_engine::memory::{ModelMemory, SystemMemory};
use quire_engine::metrics::StepWork;
use quire_model_zoo::memory::{StepWeights, WeightSizes};
use quire_model_zoo::{BackendKind, LoadOptions, ModelFiles};
use serde::Serialize;
use std::time::Duration;

/// How long bandwidth is measured, and how long each peak.
const READ_BUDGET: Duration = Duration::from_millis(350);
const PEAK_BUDGET: Duration = Duration::from_millis(120);
/// Bytes read at least, and how many times the L3 cache: what it keeps from pass to pass then adds
/// two or three percent; half as much adds ten.
const LEAST_READ: usize = 512 << 20;
const L3_CACHES: usize = 16;

/// Bytes to read for the bandwidth of memory: several times what caches hold, within what is
/// available.
pub fn read_size() -> usize {
    let wanted = LEAST_READ.max(L3_CACHES * caches().l3.unwrap_or(0));
    let available = SystemMemory::read().map_or(usize::MAX, |memory| memory.available);
    wanted.min(available / 4)
}

/// What the machine can do with all threads of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ceilings {
    /// Bytes read from memory a second.
    pub read_bandwidth: f64,
    /// Multiplications and additions a second, in the type of the weights that are not quantised.
    pub matrix_peak: f64,
    /// The same of bytes; null where no weight is quantised.
    pub int8_peak: Option<f64>,
}

/// What a step of a model takes of a machine.
#[derive(Clone, Copy, Debug)]
pub struct Roofline {
    /// Of the machine.
    pub ceilings: Ceilings,
    weights: StepWeights,
    /// Bytes of the key and the value of a token.
    kv_bytes: f64,
    /// Operations for a token and a key that it sees.
    pair_ops: f64,
}

impl Roofline {
    /// Of the model with `options`, after measuring the machine for less than a second. `None`:
    /// something else than the CPU runs it, its windows make steps take less than the formula, or
    /// the work of a step is not what is done while it is timed, as it is planned ahead.
    ///
    /// # Errors
    /// The machine cannot be measured as asked for.
    pub fn measure(files: &ModelFiles, options: &LoadOptions) -> anyhow::Result<Option<Self>> {
        let has_windows = files.spec.windows.iter().any(Option::is_some);
        let is_ahead = options.engine.async_scheduling == Some(true);
        if options.backend != BackendKind::Cpu || has_windows || is_ahead {
            return Ok(None);
        }
        let memory = files.memory(options);
        let weights = memory.step_weights();
        let threads = options.threads.unwrap_or_else(usable_cores);
        let ctx = Ctx::new(options.isa.unwrap_or_else(Isa::detect), threads)?;
        let buffer = ReadBuffer::new(&ctx, read_size(), Pages::Huge)
            .context("no room to measure the read bandwidth; --no-ceiling leaves it out")?;
        let kind = match memory.dtype() {
            DType::F32 => MatrixKind::F32,
            DType::Bf16 => MatrixKind::Bf16,
        };
        let quantised = weights.layers.quantised + weights.head.quantised > 0;
        let peak = |kind| matrix_peak(&ctx, kind, PEAK_BUDGET);
        let ceilings = Ceilings {
            read_bandwidth: read_bandwidth(&ctx, &buffer, READ_BUDGET),
            matrix_peak: peak(kind),
            int8_peak: quantised.then(|| peak(MatrixKind::Int8)),
        };
        let info = memory.info();
        let kv_bytes =
            2 * info.num_layers * info.num_kv_heads * info.head_dim * memory.dtype().size();
        let pair_ops = 4 * info.num_layers * info.num_heads * info.head_dim;
        let (kv_bytes, pair_ops) = (kv_bytes as f64, pair_ops as f64);
        Ok(Some(Roofline { ceilings, weights, kv_bytes, pair_ops }))
    }

    /// Seconds that `work` takes at least to read, and to multiply.
    fn bounds(&self, work: &StepWork) -> (f64, f64) {
        let Roofline { ceilings, weights: StepWeights { layers, head }, .. } = self;
        let head_bytes = if work.logit_rows > 0 { head.bytes } else { 0 };
        let bytes = (layers.bytes + head_bytes) as f64 + work.read_keys as f64 * self.kv_bytes;
        let ops = |elements: fn(&WeightSizes) -> u64| {
            let (tokens, rows) = (work.tokens as f64, work.logit_rows as f64);
            2.0 * (tokens * elements(layers) as f64 + rows * elements(head) as f64)
        };
        let plain = ops(|sizes| sizes.plain) + work.attended_keys as f64 * self.pair_ops;
        let bytes_s = ceilings.int8_peak.map_or(0.0, |peak| ops(|sizes| sizes.quantised) / peak);
        (bytes / ceilings.read_bandwidth, plain / ceilings.matrix_peak + bytes_s)
    }

    /// How close `steps` came.
    pub fn shares(&self, steps: &[TimedStep]) -> Shares {
        let mut shares = Shares::default();
        for TimedStep { work, seconds } in steps.iter().filter(|step| step.work.tokens > 0) {
            let (read, multiply) = self.bounds(work);
            let share =
                if read >= multiply { &mut shares.reading } else { &mut shares.multiplying };
            let share = share.get_or_insert_default();
            share.num_steps += 1;
            share.duration_s += seconds;
            share.bound_s += read.max(multiply);
        }
        for share in [&mut shares.reading, &mut shares.multiplying].into_iter().flatten() {
            share.percent = 100.0 * super::report::over(share.bound_s, share.duration_s);
        }
        shares
    }
}

/// A step as it was measured.
#[derive(Clone, Copy, Debug, Default)]
pub struct TimedStep {
    /// What it computed.
    pub work: StepWork,
    /// How long it took, planning and sampling included.
    pub seconds: f64,
}

/// Steps by what bounds them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Shares {
    /// Those that reading bounds; null: there are none.
    pub reading: Option<Share>,
    /// Those that multiplying bounds; null: there are none.
    pub multiplying: Option<Share>,
}

/// How close some steps came to what bounds them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Share {
    /// Steps.
    pub num_steps: usize,
    /// What they took.
    pub duration_s: f64,
    /// What they take at least.
    pub bound_s: f64,
    /// The second over the first; over 100 where a ceiling was measured too low, or caches helped.
    pub percent: f64,
}

/// The ceilings on a line.
pub fn described(ceilings: &Ceilings) -> String {
    let Ceilings { read_bandwidth, matrix_peak, int8_peak } = ceilings;
    let giga = |rate: f64| rate / 1e9;
    let mut text = format!(
        "read {:.1} GB/s, multiply {:.0} GFLOP/s",
        giga(*read_bandwidth),
        giga(*matrix_peak)
    );
    if let Some(peak) = int8_peak {
        text.push_str(&format!(", int8 {:.0} GOP/s", giga(*peak)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1000 bytes a second, 100 operations in the dtype, 200 of bytes.
    fn roofline(quantised: u64) -> Roofline {
        let layers = WeightSizes { bytes: 500, plain: 10, quantised };
        let head = WeightSizes { bytes: 100, plain: 5, quantised: 0 };
        let int8_peak = (quantised > 0).then_some(200.0);
        Roofline {
            ceilings: Ceilings { read_bandwidth: 1000.0, matrix_peak: 100.0, int8_peak },
            weights: StepWeights { layers, head },
            kv_bytes: 10.0,
            pair_ops: 4.0,
        }
    }

    fn step(tokens: u64, logit_rows: u64, keys: u64, seconds: f64) -> TimedStep {
        let work = StepWork { tokens, logit_rows, read_keys: keys, attended_keys: 2 * keys };
        TimedStep { work, seconds }
    }

    #[test]
    fn the_bound_is_that_of_the_formula() {
        let bounds = |step: TimedStep, quantised| roofline(quantised).bounds(&step.work);
        // 500 + 100 + 3 · 10 bytes; 2 · (10 + 5) + 6 · 4 operations.
        assert_eq!(bounds(step(1, 1, 3, 0.0), 0), (0.63, 0.54));
        // Without logits, the head is neither read nor multiplied by.
        assert_eq!(bounds(step(2, 0, 0, 0.0), 0), (0.5, 0.4));
        assert_eq!(bounds(step(2, 0, 0, 0.0), 50), (0.5, 0.4 + 1.0));
    }

    #[test]
    fn steps_are_summed_by_what_bounds_them() {
        let steps =
            [step(1, 1, 3, 0.5), step(0, 0, 0, 9.0), step(1, 1, 3, 1.25), step(10, 0, 0, 4.0)];
        let shares = roofline(0).shares(&steps);
        let reading = shares.reading.unwrap();
        assert_eq!((reading.num_steps, reading.duration_s, reading.bound_s), (2, 1.75, 1.26));
        assert!((reading.percent - 72.0).abs() < 1e-9, "{reading:?}");
        let multiplying = shares.multiplying.unwrap();
        assert_eq!((multiplying.num_steps, multiplying.percent), (1, 50.0));
        assert_eq!(roofline(0).shares(&[]), Shares::default());
    }
}
