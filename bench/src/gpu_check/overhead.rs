//! What a decode step takes besides its kernels, with graphs and without.
//!
//! Steps follow each other as an engine makes them: each is launched before the tokens of the one
//! before are read. What the kernels of a step take is timed behind something long, where the device
//! never waits for the host; the gaps that it makes between kernels by itself are part of that.

use super::kit::{Device, Kit};
use super::report::Figure;
use super::{EAGER, Run};
use crate::models::{RandomWeights, Room};
use anyhow::Context;
use half::bf16;
use quire_engine::backend::CudaOptions;
use quire_engine::backend::cuda::CudaKvCache;
use quire_engine::model::{MAX_LOGIT_ROWS, Model};
use quire_engine::ops::{Backend, BackendError, ForwardInput, StepLimits};
use quire_engine::runner::RunnerSizes;
use quire_engine::sampling::{SampleOutput, SamplingBatch, SamplingRow};
use quire_model_zoo::decoder::{Decoder, DecoderLimits};
use serde_json::json;
use std::time::Instant;

/// Microseconds that a step may take the host beyond the kernels.
const AIM_US: f64 = 50.0;
const BLOCK_SIZE: usize = 16;
/// Steps before those that are timed: graphs are captured in the second of a shape.
const WARM_UP: usize = 4;
/// Steps launched behind something long: as many as may be under way.
const BEHIND: usize = 2;
/// The best of so many counts.
const ROUNDS: usize = 3;

/// Times steps of all batches, both ways.
pub(super) fn run(run: &mut Run) -> anyhow::Result<()> {
    for &batch in run.sizes.step_batches {
        for graphs in [false, true] {
            let mode = if graphs { "graphs" } else { "eager" };
            if run.has_time_for(&format!("steps of {batch} sequences, {mode}")) {
                steps(run, batch, graphs)?;
            }
        }
    }
    Ok(())
}

fn steps(run: &mut Run, batch: usize, graphs: bool) -> anyhow::Result<()> {
    let mut steps = Steps::new(run, batch, graphs)?;
    for _ in 0..WARM_UP {
        steps.launch()?;
        steps.read()?;
    }
    let wall = steps.time_wall(run.sizes.steps)?;
    let device = steps.time_device()?;
    let params = json!({
        "model": run.sizes.step_model.0, "batch": batch, "keys": run.sizes.step_context,
        "mode": if graphs { "graphs" } else { "eager" },
    });
    let figure = |name| Figure::new(name, "µs", params.clone());
    run.figure(figure("step").ms(wall).value(1e3 * wall));
    run.figure(figure("kernels of a step").ms(device).value(1e3 * device));
    let overhead = (wall - device).max(0.0);
    run.figure(figure("step less its kernels").ms(overhead).value(1e3 * overhead).aim(AIM_US));
    Ok(())
}

/// The same decode step, over and over.
struct Steps {
    kit: Kit,
    model: Decoder<Device>,
    kv: CudaKvCache<bf16>,
    input: ForwardInput,
    sampling: SamplingBatch,
    samples: Vec<SampleOutput>,
}

impl Steps {
    fn new(run: &Run, batch: usize, graphs: bool) -> anyhow::Result<Self> {
        let (sizes, context) = (&run.sizes.step_model.1, run.sizes.step_context);
        let spec = sizes.spec(context);
        let blocks = context.div_ceil(BLOCK_SIZE);
        let room = Room {
            max_tokens: batch,
            max_seqs: batch,
            max_positions: context,
            num_blocks: batch * blocks,
            block_size: BLOCK_SIZE,
        };
        let options = CudaOptions { enforce_eager: !graphs, ..EAGER };
        let mut kit = Kit::new(options, run.sizes, run.dry_run)?;
        let limits = DecoderLimits { max_tokens: batch, max_positions: context };
        let source = RandomWeights::new(&spec);
        let model = Decoder::load(&spec, &source, &mut kit.device, &limits, &mut |_| ())?;
        let RunnerSizes { layout, .. } = room.runner_sizes(&spec);
        let mut kv = kit.device.kv_cache(&layout)?;
        kv.fill(0)?;
        kit.device.reserve(&StepLimits {
            max_tokens: batch,
            max_seqs: batch,
            max_positions: context,
            max_logprobs: 1,
            block_size: BLOCK_SIZE,
            swap: false,
            vocab_size: sizes.vocab,
            num_heads: sizes.heads,
        })?;
        let row = SamplingRow { temperature: 0.0, ..SamplingRow::default() };
        let sampling = SamplingBatch {
            rows: vec![row; batch],
            vocab_limit: sizes.vocab,
            ..SamplingBatch::default()
        };
        let input = input(batch, context, blocks);
        Ok(Steps { kit, model, kv, input, sampling, samples: Vec::new() })
    }

    fn launch(&mut self) -> anyhow::Result<()> {
        let Steps { kit, model, kv, input, sampling, .. } = self;
        Ok(launch(&mut kit.device, (model, kv), input, sampling)?)
    }

    fn read(&mut self) -> anyhow::Result<()> {
        self.samples.clear();
        self.kit.device.read_samples(&mut self.samples)?;
        // The next step takes the tokens of this one.
        let rows = 0..self.input.num_tokens() as u32;
        self.input.placeholders.clear();
        self.input.placeholders.extend(rows.map(|row| (row, row)));
        let failed = self.samples.iter().find_map(|sample| sample.token.err());
        failed.map_or(Ok(()), |error| Err(error).context("a row of logits"))
    }

    /// Milliseconds from step to step.
    fn time_wall(&mut self, steps: usize) -> anyhow::Result<f64> {
        self.launch()?;
        let start = Instant::now();
        for _ in 0..steps {
            self.launch()?;
            self.read()?;
        }
        let ms = start.elapsed().as_secs_f64() * 1e3 / steps as f64;
        self.read()?;
        Ok(ms)
    }

    /// Milliseconds of the device for the launches of a step.
    fn time_device(&mut self) -> anyhow::Result<f64> {
        let mut best = f64::INFINITY;
        for _ in 0..ROUNDS {
            // Long enough for the host to launch all that follows.
            self.kit.busy();
            self.kit.busy();
            let Steps { kit, model, kv, input, sampling, .. } = self;
            let mut launched = Ok(());
            let ms = kit.device.time_ms(|device| {
                for _ in 0..BEHIND {
                    if launched.is_ok() {
                        launched = launch(device, (model, kv), input, sampling);
                    }
                }
            })?;
            launched?;
            best = best.min(ms / BEHIND as f64);
            for _ in 0..BEHIND {
                self.read()?;
            }
        }
        Ok(best)
    }
}

/// All launches of a step.
fn launch(
    device: &mut Device,
    (model, kv): (&mut Decoder<Device>, &mut CudaKvCache<bf16>),
    input: &ForwardInput,
    sampling: &SamplingBatch,
) -> Result<(), BackendError> {
    device.begin_step(input)?;
    model.forward(device, kv);
    for start in (0..sampling.rows.len()).step_by(MAX_LOGIT_ROWS) {
        let rows = start..sampling.rows.len().min(start + MAX_LOGIT_ROWS);
        let logits = model.logits(device, rows.clone());
        device.sample(logits, sampling, rows)?;
    }
    device.end_step()
}

/// Sequences of `context` tokens, the last of them new.
fn input(batch: usize, context: usize, blocks: usize) -> ForwardInput {
    let mut input = ForwardInput::default();
    input.clear(blocks);
    for seq in 0..batch {
        let first = seq * blocks;
        input.token_ids.push(seq as u32 % 256);
        input.positions.push(context as u32 - 1);
        input.slot_mapping.push((first * BLOCK_SIZE + context - 1) as i64);
        input.query_start_loc.push(seq as i32 + 1);
        input.seq_lens.push(context as i32);
        input.block_table.extend((first..first + blocks).map(|block| block as i32));
        input.logits_indices.push(seq as u32);
    }
    input
}
