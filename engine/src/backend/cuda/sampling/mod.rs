//! Sampling on the device: from rows of logits to tokens that stay there, and results that follow
//! on a second stream.
//!
//! ```text
//! compute  ─ sample slice ─ sample slice ─ ● ─ the next step: reads the tokens, fills the other results
//! copies                                   └─ copy of the results ─ ● what `read` waits for
//! ```
//!
//! At most two steps are under way: one whose results are on their way, one that computes. Each has
//! results of its own; all else is a slice's, and the next slice overwrites it. A slice's launches
//! are those that its rows need; what they choose does not depend on which rows are together.
//!
//! # Rows of the host
//! A row with a custom processor, and one that asks for more than [`MAX_DEVICE_TOP`] best tokens,
//! is sampled on the host, as the CPU backend would. That waits for the device, so while such a
//! request runs, no step is prepared ahead.

mod launches;
mod results;
mod rows;

use super::arena::Arena;
use super::driver::{DeviceBuffer, Event, PinnedBuffer, Stream};
use super::error::CudaError;
use super::launcher::Launcher;
use crate::sampling::{SampleOutput, Sampler, SamplingBatch, sample_row};
use launches::{Kernels, Outputs, Scratch, ScratchSizes, Slice};
use quire_kernels_cpu::Isa;
use quire_kernels_ptx::DevicePtr;
use results::{Answer, ResultShape, StepAnswers, WORD};
use rows::{DeviceRow, ListSizes, Needs, RowArrays};
use std::collections::VecDeque;
use std::ops::Range;

/// Best tokens that the device finds for a row, each in a pass over all it has found before.
const MAX_DEVICE_TOP: usize = 64;
/// Steps whose results are not read.
const MAX_STEPS: usize = 2;
/// Slices begin at multiples of this row, so that their arrays are aligned as the kernels want.
const ROW_ALIGN: usize = 4;
/// There is room from the start for so many ids of rows with lists, of each kind of list. A step
/// that has more takes more memory, for good.
const LIST_ROOM: usize = 1 << 16;

/// The largest step.
#[derive(Clone, Copy, Debug)]
pub(super) struct SamplerLimits {
    /// Rows of logits of a step.
    pub max_rows: usize,
    /// Rows sampled at a time.
    pub slice_rows: usize,
    /// Logits of a row, with padding; a multiple of 16.
    pub stride: usize,
    /// Best tokens that a row may ask for.
    pub max_top: usize,
}

impl SamplerLimits {
    /// The same with the best tokens that the device finds; `None`: more than can be addressed.
    fn of_device(self) -> Option<Self> {
        let SamplerLimits { max_rows, slice_rows, stride, max_top } = self;
        i32::try_from(stride).ok()?;
        // More than all arrays together, which have at most so many elements of 8 bytes each and
        // are fewer than 64.
        let rows = max_rows.max(slice_rows).checked_add(LIST_ROOM)?;
        rows.checked_mul(stride.max(1))?.checked_mul(MAX_DEVICE_TOP * size_of::<i64>() * 64)?;
        Some(SamplerLimits { max_top: max_top.clamp(1, MAX_DEVICE_TOP), ..self })
    }

    fn result_bytes(&self) -> usize {
        ResultShape::new(self.max_rows, Some(self.max_top)).bytes()
    }

    fn parameter_bytes(&self) -> usize {
        let lists = ListSizes { ids: LIST_ROOM, biases: LIST_ROOM, seen: LIST_ROOM };
        RowArrays::new(self.max_rows, lists).1.bytes()
    }
}

/// A step's results, on the device and on their way to the host.
struct Results {
    device: DeviceBuffer,
    host: PinnedBuffer,
}

/// A step that is being sampled.
struct OpenStep {
    answers: StepAnswers,
    arrays: RowArrays,
}

/// Chooses tokens on the device.
pub(super) struct DeviceSampler {
    limits: SamplerLimits,
    kernels: Kernels,
    scratch: Scratch,
    parameters: Arena,
    results: [Results; MAX_STEPS],
    /// The stream of the results' copies.
    copies: Stream,
    /// A step's rows are all sampled.
    sampled: Event,
    /// Which results are those of the step that is open, or of the next.
    turn: usize,
    open: Option<OpenStep>,
    /// Its rows.
    rows: Vec<DeviceRow>,
    /// Steps that ended and where their results are, oldest first.
    ended: VecDeque<(usize, StepAnswers)>,
    /// Those that were read; their arrays serve again.
    spare: Vec<StepAnswers>,
    host: Sampler,
    /// A row of the host's.
    logits: Vec<f32>,
}

impl DeviceSampler {
    /// A sampler for steps within `limits`.
    pub fn new(launcher: &mut Launcher, limits: SamplerLimits) -> Result<Self, CudaError> {
        assert!(limits.stride.is_multiple_of(16), "rows of {} logits", limits.stride);
        let Some(of_device) = limits.of_device() else {
            let reason = format!("{limits:?} is more than can be addressed; lower it");
            return Err(CudaError::Unsupported { reason });
        };
        let kernels = Kernels::new(launcher)?;
        let scratch = Scratch::new(launcher, &ScratchSizes::new(&of_device))?;
        let (context, bytes) = (launcher.context(), of_device.result_bytes());
        let results = || -> Result<Results, CudaError> {
            let device = context.alloc(bytes, "sampling results")?;
            // Rows without a target, and those without log-probabilities, have none.
            launcher.stream().zero(&device, 0..bytes)?;
            Ok(Results { device, host: context.alloc_pinned(bytes, "sampling results")? })
        };
        Ok(DeviceSampler {
            kernels,
            scratch,
            parameters: Arena::new(context, of_device.parameter_bytes(), "sampling parameters")?,
            results: [results()?, results()?],
            copies: context.stream()?,
            sampled: context.event()?,
            turn: 0,
            open: None,
            rows: Vec::new(),
            ended: VecDeque::new(),
            spare: Vec::new(),
            host: Sampler::new(Isa::Portable),
            logits: Vec::new(),
            limits: of_device,
        })
    }

    /// Device bytes that [`DeviceSampler::new`] allocates; `None`: more than can be addressed.
    pub fn bytes(limits: &SamplerLimits) -> Option<usize> {
        let limits = limits.of_device()?;
        let results = MAX_STEPS * limits.result_bytes();
        Some(ScratchSizes::new(&limits).total() + results + limits.parameter_bytes())
    }

    /// Forgets a step that did not end.
    pub fn begin_step(&mut self) {
        if let Some(open) = self.open.take() {
            self.spare.push(open.answers);
        }
    }

    /// Samples `logits`, `[rows.len(), stride]`, by `batch.rows[rows]`. The slices of a step come in
    /// ascending order, with the same batch.
    pub fn sample(
        &mut self,
        launcher: &mut Launcher,
        logits: DevicePtr<f32>,
        batch: &SamplingBatch,
        rows: Range<usize>,
    ) -> Result<(), CudaError> {
        assert!(!launcher.is_replaying(), "sampling is part of no graph");
        assert!(rows.len() <= self.limits.slice_rows, "a slice of {} rows", rows.len());
        assert!(rows.start.is_multiple_of(ROW_ALIGN), "a slice that begins at row {}", rows.start);
        launcher.take_failure()?;
        if self.open.is_none() {
            self.open_step(launcher, batch)?;
        }
        let open = self.open.as_ref().expect("it was opened");
        let slice_rows = &self.rows[rows.clone()];
        let needs = slice_rows.iter().fold(Needs::NOTHING, |needs, row| needs.or(row.needs));
        if !needs.answer {
            return Ok(());
        }
        let slice = Slice {
            kernels: &self.kernels,
            scratch: &self.scratch,
            arena: &self.parameters,
            arrays: &open.arrays,
            outputs: Outputs { buffer: &self.results[self.turn].device, shape: open.answers.shape },
            logits,
            vocab: batch.vocab_limit,
            stride: self.limits.stride,
            range: rows.clone(),
            rows: slice_rows,
            needs,
        };
        slice.launch(launcher);
        if needs.host { self.sample_on_host(launcher, batch, rows) } else { Ok(()) }
    }

    /// Takes the rows of a step and brings their parameters to the device.
    fn open_step(
        &mut self,
        launcher: &mut Launcher,
        batch: &SamplingBatch,
    ) -> Result<(), CudaError> {
        let (num_rows, vocab) = (batch.rows.len(), batch.vocab_limit);
        assert!(num_rows <= self.limits.max_rows, "{num_rows} rows of logits");
        assert!(vocab <= self.limits.stride, "a vocabulary of {vocab}");
        self.assert_turn();
        let mut answers = self.new_answers();
        let max_top = self.limits.max_top;
        self.rows.clear();
        self.rows.extend(batch.rows.iter().map(|row| DeviceRow::new(row, vocab, max_top)));
        let mut most = None;
        for (row, DeviceRow { needs, .. }) in self.rows.iter().enumerate() {
            let num_top = usize::try_from(needs.num_top).ok();
            most = most.max(num_top);
            if needs.host {
                answers.answers.push(Answer::Host);
            } else if needs.answer {
                answers.answers.push(Answer::Device { row, num_top });
            }
        }
        answers.shape = ResultShape::new(num_rows, most);
        let (arrays, layout) = RowArrays::new(num_rows, ListSizes::of(batch));
        self.parameters.fit(&layout)?;
        arrays.write(&mut self.parameters.staging()?, &self.rows, batch);
        self.parameters.upload(launcher.stream(), &layout)?;
        self.open = Some(OpenStep { answers, arrays });
        Ok(())
    }

    /// Answers the host's rows of a slice, and puts their tokens where the others are.
    fn sample_on_host(
        &mut self,
        launcher: &mut Launcher,
        batch: &SamplingBatch,
        rows: Range<usize>,
    ) -> Result<(), CudaError> {
        launcher.take_failure()?;
        let answers = &mut self.open.as_mut().expect("a step is open").answers;
        let results = &self.results[self.turn].device;
        self.logits.resize(batch.vocab_limit, 0.0);
        for row in rows.clone().filter(|&row| self.rows[row].needs.host) {
            let at = WORD * (row - rows.start) * self.limits.stride;
            let logits = bytemuck::cast_slice_mut(&mut self.logits);
            let range = at..at + logits.len();
            launcher.stream().download_now(&self.scratch.work, range, logits)?;
            let output = sample_row(&mut self.host, &mut self.logits, &batch.rows[row], batch);
            let token = output.token.map_or(0, |token| as_i32(token.into()));
            let at = WORD * answers.shape.token(row);
            launcher.stream().upload_now(&token.to_ne_bytes(), results, at)?;
            answers.by_host.push(output);
        }
        Ok(())
    }

    /// The step has no more slices; its results set out for the host.
    pub fn end_step(&mut self, launcher: &mut Launcher) -> Result<(), CudaError> {
        launcher.take_failure()?;
        let answers = match self.open.take() {
            Some(open) => open.answers,
            // A step without rows.
            None => {
                self.assert_turn();
                self.new_answers()
            }
        };
        let bytes = answers.shape.bytes();
        if bytes > 0 {
            let results = &mut self.results[self.turn];
            launcher.stream().record(&self.sampled)?;
            self.copies.wait(&self.sampled)?;
            self.copies.download(&results.device, 0..bytes, &mut results.host, 0)?;
        }
        self.ended.push_back((self.turn, answers));
        self.turn = (self.turn + 1) % MAX_STEPS;
        Ok(())
    }

    /// Waits for the oldest step that ended and was not read, and appends an answer for each of its
    /// rows that has a target, in row order.
    pub fn read(&mut self, out: &mut Vec<SampleOutput>) -> Result<(), CudaError> {
        let (turn, mut answers) = self.ended.pop_front().expect("a step that ended");
        if !answers.answers.is_empty() {
            answers.read(self.results[turn].host.as_slice()?, out);
        }
        self.spare.push(answers);
        Ok(())
    }

    /// The tokens of the last step that ended, by row; 0 where a row failed. They stay there until
    /// the step after the next is sampled.
    pub fn chosen(&self) -> DevicePtr<i32> {
        let last = (self.turn + MAX_STEPS - 1) % MAX_STEPS;
        self.results[last].device.ptr()
    }

    /// Forgets the steps that were not read, and one that did not end.
    pub fn abandon(&mut self) {
        self.begin_step();
        self.spare.extend(self.ended.drain(..).map(|(_, answers)| answers));
    }

    /// The results that come next must have been read.
    fn assert_turn(&self) {
        assert!(self.ended.len() < MAX_STEPS, "{MAX_STEPS} steps wait to be read");
    }

    fn new_answers(&mut self) -> StepAnswers {
        let mut answers = self.spare.pop().unwrap_or_default();
        answers.clear();
        answers
    }
}

/// `x` as the kernels take it. No id, count or size in use comes near the limit, and an id beyond
/// it must not become a negative one.
fn as_i32(x: u64) -> i32 {
    i32::try_from(x).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: SamplerLimits =
        SamplerLimits { max_rows: 256, slice_rows: 64, stride: 151_936, max_top: 20 };

    #[test]
    fn memory_is_that_of_the_logits_and_a_little() {
        let bytes = DeviceSampler::bytes(&LIMITS).expect("it can be addressed");
        let logits = WORD * 64 * 151_936;
        assert!(bytes > logits && bytes < logits + (4 << 20), "{bytes} bytes");
    }

    #[test]
    fn the_device_takes_few_best_tokens_whatever_is_allowed() {
        let bytes = |max_top| DeviceSampler::bytes(&SamplerLimits { max_top, ..LIMITS });
        assert!(bytes(0) == bytes(1) && bytes(1) < bytes(MAX_DEVICE_TOP));
        assert_eq!(bytes(MAX_DEVICE_TOP), bytes(151_936));
    }

    #[test]
    fn what_cannot_be_addressed_has_no_size() {
        for limits in [
            SamplerLimits { max_rows: usize::MAX, ..LIMITS },
            SamplerLimits { slice_rows: usize::MAX / 64, ..LIMITS },
            SamplerLimits { stride: 1 << 31, ..LIMITS },
        ] {
            assert_eq!(DeviceSampler::bytes(&limits), None, "{limits:?}");
        }
    }

    #[test]
    fn an_id_beyond_the_kernels_integers_is_beyond_every_vocabulary() {
        assert_eq!([0, 7, u32::MAX].map(|id| as_i32(id.into())), [0, 7, i32::MAX]);
    }
}
