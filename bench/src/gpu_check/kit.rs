//! A device to be measured: inputs of any shape, and times of what is launched.
//!
//! A launch takes the host longer than many a kernel takes the device. So what is timed is launched
//! while the device is busy with something long, and runs through without waiting for the host.

use super::sizes::Sizes;
use crate::Random;
use anyhow::Context;
use half::bf16;
use quire_engine::DType;
use quire_engine::backend::cuda::{CudaMatrix, CudaTensor};
use quire_engine::backend::{CudaBackend, CudaOptions};
use quire_engine::ops::{
    Backend, ForwardInput, KvLayout, MatrixLayout, ReadError, StepLimits, TensorKind, WeightRows,
};
use quire_tests::harness::row_input;

pub(super) type Device = CudaBackend<bf16>;
pub(super) type Tensor = CudaTensor<bf16>;
pub(super) type Matrix = CudaMatrix<bf16>;

/// Milliseconds that what is timed shall take: as many times as that needs.
const TIMED_MS: f64 = 3.0;
/// Most launches behind the long one; the driver takes about a thousand before it waits.
const MAX_REPEATS: usize = 100;
/// The best of so many counts.
const ROUNDS: usize = 3;
/// Rows of tables that activations are made of.
const TABLE_ROWS: usize = 128;
/// Logits of a row, where no logits matter.
const VOCAB: usize = 256;

/// A device and what keeps it busy.
pub(super) struct Kit {
    pub device: Device,
    limits: StepLimits,
    /// `x`, `w` and what becomes of them: a product that takes milliseconds.
    long: Option<(Tensor, Matrix, Tensor)>,
    dry_run: bool,
}

impl Kit {
    /// A device with room for the largest steps of a run.
    pub fn new(options: CudaOptions, sizes: &Sizes, dry_run: bool) -> anyhow::Result<Self> {
        let device = Device::new(options)?;
        let heads = &sizes.attention;
        let largest = |sizes: &[usize]| sizes.iter().copied().max().unwrap_or(1);
        let most_rows = largest(heads.prefill).max(largest(sizes.gemm_rows)).max(sizes.peak);
        let limits = StepLimits {
            max_tokens: most_rows.max(1 << 14),
            max_seqs: largest(heads.batches).max(heads.fold_seqs),
            max_positions: largest(heads.contexts).max(largest(heads.prefill)),
            max_logprobs: 1,
            block_size: 8,
            swap: false,
            vocab_size: VOCAB,
            num_heads: heads.kv_heads * largest(heads.groups).max(heads.prefill_group),
        };
        let mut kit = Kit { device, limits, long: None, dry_run };
        let layout = KvLayout {
            num_layers: 1,
            num_blocks: 1,
            block_size: limits.block_size,
            num_kv_heads: heads.kv_heads,
            head_dim: heads.head_dim,
            dtype: DType::Bf16,
        };
        kit.device.kv_cache(&layout)?;
        kit.reserve(layout.block_size)?;
        let n = sizes.peak;
        let (x, w) = (kit.compute(n, n)?, kit.matrix(MatrixLayout::Plain, n, n)?);
        let out = kit.device.tensor(n, n, TensorKind::F32)?;
        kit.long = Some((x, w, out));
        Ok(kit)
    }

    /// Room for steps over blocks of `block_size`, after a KV cache was made.
    pub fn reserve(&mut self, block_size: usize) -> anyhow::Result<()> {
        self.limits.block_size = block_size;
        Ok(self.device.reserve(&self.limits)?)
    }

    /// A weight of random numbers.
    pub fn matrix(&mut self, layout: MatrixLayout, n: usize, k: usize) -> anyhow::Result<Matrix> {
        let rows = RandomRows::new(k);
        let matrix = self.device.matrix(layout, n, k, &rows)?;
        // Weights are copied on a stream of their own.
        self.device.synchronize()?;
        Ok(matrix)
    }

    /// `[rows, cols]` random numbers in f32. Begins a step of its own.
    pub fn floats(&mut self, rows: usize, cols: usize) -> anyhow::Result<Tensor> {
        let table_rows = rows.min(TABLE_ROWS);
        let table = self.matrix(MatrixLayout::Plain, table_rows, cols)?;
        let mut input = row_input(rows);
        input.token_ids.iter_mut().for_each(|id| *id %= table_rows as u32);
        self.device.begin_step(&input)?;
        let mut out = self.device.tensor(rows, cols, TensorKind::F32)?;
        self.device.embed(&table, &mut out);
        self.device.synchronize()?;
        Ok(out)
    }

    /// The same in the type that models are computed in.
    pub fn compute(&mut self, rows: usize, cols: usize) -> anyhow::Result<Tensor> {
        let floats = self.floats(rows, cols)?;
        let ones = self.device.vector(&vec![1.0; cols])?;
        let mut out = self.device.tensor(rows, cols, TensorKind::Compute)?;
        self.device.rms_norm(&floats, &ones, 1e-5, &mut out);
        self.device.synchronize()?;
        Ok(out)
    }

    /// Begins a step.
    pub fn begin(&mut self, input: &ForwardInput) -> anyhow::Result<()> {
        Ok(self.device.begin_step(input)?)
    }

    /// Milliseconds of the long product.
    pub fn time_long(&mut self) -> anyhow::Result<f64> {
        let (x, w, mut out) = self.long.take().expect("it is there");
        let time = self.device.time_ms(|device| device.linear(&x, &w, None, &mut out));
        self.long = Some((x, w, out));
        time.context("a matrix product")
    }

    /// Keeps the device busy for some milliseconds.
    pub fn busy(&mut self) {
        let Kit { device, long, .. } = self;
        let (x, w, out) = long.as_mut().expect("it is there");
        for _ in 0..2 {
            device.linear(x, w, None, out);
        }
    }

    /// Milliseconds that `launch` takes the device; it is given numbers that count up, so that it can
    /// take other memory each time.
    pub fn time(&mut self, mut launch: impl FnMut(&mut Device, usize)) -> anyhow::Result<f64> {
        // The first time loads kernels.
        let mut next = 0;
        let mut times = |kit: &mut Kit, repeats: usize| -> anyhow::Result<f64> {
            kit.busy();
            let ms = kit.device.time_ms(|device| {
                for _ in 0..repeats {
                    launch(device, next);
                    next += 1;
                }
            })?;
            Ok(ms / repeats as f64)
        };
        let first = times(self, 1)?;
        if self.dry_run {
            return Ok(first);
        }
        let once = times(self, 2)?.max(1e-6);
        let repeats = (TIMED_MS / once).ceil().clamp(2.0, MAX_REPEATS as f64) as usize;
        let mut best = f64::INFINITY;
        for _ in 0..ROUNDS {
            best = best.min(times(self, repeats)?);
        }
        Ok(best)
    }
}

/// Random rows of a weight: pieces of a pool.
struct RandomRows {
    pool: Vec<bf16>,
    k: usize,
}

impl RandomRows {
    fn new(k: usize) -> Self {
        let noise = Random::new(7).floats(2 * k + 4096);
        let scale = (3.0 / k as f32).sqrt();
        RandomRows { pool: noise.iter().map(|x| bf16::from_f32(x * scale)).collect(), k }
    }

    fn row(&self, row: usize) -> &[bf16] {
        let start = row.wrapping_mul(0x9E37_79B1) % (self.pool.len() - self.k);
        &self.pool[start..start + self.k]
    }
}

impl WeightRows for RandomRows {
    fn read(&self, row: usize, out: &mut [f32]) -> Result<(), ReadError> {
        out.iter_mut().zip(self.row(row)).for_each(|(out, x)| *out = x.to_f32());
        Ok(())
    }

    fn stored_type(&self) -> Option<DType> {
        Some(DType::Bf16)
    }

    fn stored(&self, row: usize) -> Option<&[u8]> {
        Some(bytemuck::cast_slice(self.row(row)))
    }
}
