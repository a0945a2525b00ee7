//! The launches from logits to tokens and log-probabilities, as few as the rows of a slice allow.

use super::super::arena::{Arena, Array};
use super::super::driver::DeviceBuffer;
use super::super::launcher::{Kernel, Launcher, Work};
use super::super::{driver::Context, error::CudaError};
use super::results::{ResultShape, WORD};
use super::rows::{DeviceRow, Needs, RowArrays};
use super::{SamplerLimits, as_i32};
use quire_kernels_ptx::launch::{
    ChooseTokens, CutLogits, DrawPartials, EditLogits, FoldLogprobs, FoldStats, PrepareLogits,
    RowStats, ScaleLogits, SumExp, TopPartials,
};
use quire_kernels_ptx::{DevicePtr, Element};
use std::ops::Range;

/// Ids that a block of the grid takes.
pub(super) const SPLIT: usize = 4096;

/// The kernels of sampling.
pub(super) struct Kernels {
    prepare_logits: Kernel<PrepareLogits>,
    row_stats: Kernel<RowStats>,
    fold_stats: Kernel<FoldStats>,
    edit_logits: Kernel<EditLogits>,
    scale_logits: Kernel<ScaleLogits>,
    cut_logits: Kernel<CutLogits>,
    draw_partials: Kernel<DrawPartials>,
    choose_tokens: Kernel<ChooseTokens>,
    sum_exp: Kernel<SumExp>,
    top_partials: Kernel<TopPartials>,
    fold_logprobs: Kernel<FoldLogprobs>,
}

impl Kernels {
    pub fn new(launcher: &mut Launcher) -> Result<Self, CudaError> {
        const BY_SPLIT: &[(&str, i64)] = &[("SPLIT", SPLIT as i64)];
        Ok(Kernels {
            prepare_logits: launcher.select(BY_SPLIT)?,
            row_stats: launcher.select(BY_SPLIT)?,
            fold_stats: launcher.select(&[])?,
            edit_logits: launcher.select(&[])?,
            scale_logits: launcher.select(BY_SPLIT)?,
            cut_logits: launcher.select(&[])?,
            draw_partials: launcher.select(BY_SPLIT)?,
            choose_tokens: launcher.select(&[])?,
            sum_exp: launcher.select(BY_SPLIT)?,
            top_partials: launcher.select(BY_SPLIT)?,
            fold_logprobs: launcher.select(&[])?,
        })
    }
}

/// Bytes of a slice's arrays. L rows, S splits of a row, T best tokens.
#[derive(Clone, Copy)]
pub(super) struct ScratchSizes {
    /// `[L, stride]` logits.
    work: usize,
    /// `[L, S]` ranks or sums.
    ranks: usize,
    /// `[L, S]` flags.
    flags: usize,
    /// `[L, S, T]` ranks.
    top: usize,
    /// `[L]` words.
    row: usize,
}

impl ScratchSizes {
    pub fn new(limits: &SamplerLimits) -> Self {
        let splits = limits.slice_rows * limits.stride.div_ceil(SPLIT);
        ScratchSizes {
            work: WORD * limits.slice_rows * limits.stride,
            ranks: size_of::<i64>() * splits,
            flags: WORD * splits,
            top: size_of::<i64>() * splits * limits.max_top,
            row: WORD * limits.slice_rows,
        }
    }

    /// Bytes of [`Scratch`].
    pub fn total(&self) -> usize {
        self.work + 3 * self.ranks + self.flags + self.top + 7 * self.row
    }
}

/// A slice's own arrays; the next slice overwrites them.
pub(super) struct Scratch {
    /// `[L, stride]` logits to be edited.
    pub work: DeviceBuffer,
    best: DeviceBuffer,
    draws: DeviceBuffer,
    sums: DeviceBuffer,
    bad: DeviceBuffer,
    top: DeviceBuffer,
    raw: StatsBuffers,
    edited: StatsBuffers,
    cut: DeviceBuffer,
}

struct StatsBuffers {
    max: DeviceBuffer,
    argmax: DeviceBuffer,
    status: DeviceBuffer,
}

impl Scratch {
    pub fn new(launcher: &Launcher, sizes: &ScratchSizes) -> Result<Self, CudaError> {
        let context = launcher.context();
        let alloc = |bytes| context.alloc(bytes, "sampling");
        let scratch = Scratch {
            work: alloc(sizes.work)?,
            best: alloc(sizes.ranks)?,
            draws: alloc(sizes.ranks)?,
            sums: alloc(sizes.ranks)?,
            bad: alloc(sizes.flags)?,
            top: alloc(sizes.top)?,
            raw: StatsBuffers::new(context, sizes.row)?,
            edited: StatsBuffers::new(context, sizes.row)?,
            cut: alloc(sizes.row)?,
        };
        // A slice of greedy rows reads draws, whatever they are, that no slice may have made yet.
        launcher.stream().zero(&scratch.draws, 0..sizes.ranks)?;
        Ok(scratch)
    }
}

impl StatsBuffers {
    fn new(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        let alloc = || context.alloc(bytes, "sampling");
        Ok(StatsBuffers { max: alloc()?, argmax: alloc()?, status: alloc()? })
    }

    fn ptrs(&self) -> Stats {
        Stats { max: self.max.ptr(), argmax: self.argmax.ptr(), status: self.status.ptr() }
    }
}

/// Maximum, its id and status of each row of the slice.
#[derive(Clone, Copy)]
struct Stats {
    max: DevicePtr<f32>,
    argmax: DevicePtr<i32>,
    status: DevicePtr<i32>,
}

/// Where a step's results go.
#[derive(Clone, Copy)]
pub(super) struct Outputs<'a> {
    pub buffer: &'a DeviceBuffer,
    pub shape: ResultShape,
}

impl Outputs<'_> {
    fn ptr<T: Element>(&self, word: usize) -> DevicePtr<T> {
        self.buffer.ptr_at(WORD * word)
    }
}

/// Rows that are sampled together.
pub(super) struct Slice<'a> {
    pub kernels: &'a Kernels,
    pub scratch: &'a Scratch,
    pub arena: &'a Arena,
    pub arrays: &'a RowArrays,
    pub outputs: Outputs<'a>,
    /// `[rows.len(), stride]`
    pub logits: DevicePtr<f32>,
    pub vocab: usize,
    pub stride: usize,
    /// Which of the step's, and what they want.
    pub range: Range<usize>,
    pub rows: &'a [DeviceRow],
    pub needs: Needs,
}

impl Slice<'_> {
    /// Launches all that the rows need.
    pub fn launch(&self, launcher: &mut Launcher) {
        let Needs { allowed, edits, draw, host, .. } = self.needs;
        // The host reads its rows from the copy, too, which nothing below changes.
        let raw = if allowed || edits || draw || host {
            self.prepare_logits(launcher)
        } else {
            self.row_stats(launcher, self.logits, &self.scratch.raw)
        };
        if edits {
            self.edit_logits(launcher);
        }
        let edited = if allowed || edits {
            self.row_stats(launcher, self.scratch.work.ptr(), &self.scratch.edited)
        } else {
            raw
        };
        if draw {
            self.draw(launcher, edited);
        }
        self.choose_tokens(launcher, raw, edited);
        if self.needs.logprobs() {
            self.logprobs(launcher, raw);
        }
    }

    fn vocab(&self) -> i32 {
        as_i32(self.vocab as u64)
    }

    fn stride(&self) -> i32 {
        as_i32(self.stride as u64)
    }

    fn splits(&self) -> usize {
        self.vocab.div_ceil(SPLIT)
    }

    fn num_splits(&self) -> i32 {
        as_i32(self.splits() as u64)
    }

    fn by_row(&self) -> [usize; 3] {
        [self.range.len(), 1, 1]
    }

    fn by_split(&self) -> [usize; 3] {
        [self.range.len(), self.splits(), 1]
    }

    /// The slice's part of a parameter of `width` elements a row.
    fn param<T: Element>(&self, array: Array<T>, width: usize) -> DevicePtr<T> {
        let skipped = self.range.start * width * size_of::<T>();
        DevicePtr::new(self.arena.ptr(array).address() + skipped as u64)
    }

    /// Moves so many bytes for each logit of the rows for which `is_used`.
    fn by_logit(&self, bytes: usize, is_used: impl Fn(Needs) -> bool) -> Work {
        let rows = self.rows.iter().filter(|row| is_used(row.needs)).count();
        Work::bytes(bytes * rows * self.vocab)
    }

    fn prepare_logits(&self, launcher: &mut Launcher) -> Stats {
        let args = PrepareLogits {
            work: self.scratch.work.ptr(),
            best: self.scratch.best.ptr(),
            bad: self.scratch.bad.ptr(),
            logits: self.logits,
            allowed_ids: self.arena.ptr(self.arrays.ids),
            allowed_range: self.param(self.arrays.allowed, 2),
            vocab: self.vocab(),
            stride: self.stride(),
        };
        launcher.launch(self.kernels.prepare_logits, self.by_split(), &args, || {
            self.by_logit(8, |_| true)
        });
        self.fold_stats(launcher, &self.scratch.raw)
    }

    fn row_stats(
        &self,
        launcher: &mut Launcher,
        logits: DevicePtr<f32>,
        stats: &StatsBuffers,
    ) -> Stats {
        let args = RowStats {
            best: self.scratch.best.ptr(),
            bad: self.scratch.bad.ptr(),
            logits,
            vocab: self.vocab(),
            stride: self.stride(),
        };
        launcher
            .launch(self.kernels.row_stats, self.by_split(), &args, || self.by_logit(4, |_| true));
        self.fold_stats(launcher, stats)
    }

    fn fold_stats(&self, launcher: &mut Launcher, stats: &StatsBuffers) -> Stats {
        let stats = stats.ptrs();
        let args = FoldStats {
            row_max: stats.max,
            row_argmax: stats.argmax,
            row_status: stats.status,
            best: self.scratch.best.ptr(),
            bad: self.scratch.bad.ptr(),
            num_splits: self.num_splits(),
        };
        launcher.launch(self.kernels.fold_stats, self.by_row(), &args, || {
            Work::bytes(self.range.len() * 12 * (self.splits() + 1))
        });
        stats
    }

    fn edit_logits(&self, launcher: &mut Launcher) {
        let (arena, arrays) = (self.arena, self.arrays);
        let args = EditLogits {
            work: self.scratch.work.ptr(),
            suppressed_ids: arena.ptr(arrays.ids),
            suppressed_range: self.param(arrays.suppressed, 2),
            bias_ids: arena.ptr(arrays.bias_ids),
            bias_values: arena.ptr(arrays.bias_values),
            bias_range: self.param(arrays.bias, 2),
            seen_ids: arena.ptr(arrays.seen_ids),
            seen_counts: arena.ptr(arrays.seen_counts),
            seen_range: self.param(arrays.seen, 2),
            repetition_penalty: self.param(arrays.repetition_penalty, 1),
            frequency_penalty: self.param(arrays.frequency_penalty, 1),
            presence_penalty: self.param(arrays.presence_penalty, 1),
            vocab: self.vocab(),
            stride: self.stride(),
        };
        launcher.launch(self.kernels.edit_logits, self.by_row(), &args, || {
            // An id, what is done with it, and its logit twice.
            Work::bytes(16 * self.rows.iter().map(DeviceRow::num_edits).sum::<usize>())
        });
    }

    /// From edited logits to the best of each split.
    fn draw(&self, launcher: &mut Launcher, edited: Stats) {
        let work = self.scratch.work.ptr();
        let temperature = self.param(self.arrays.temperature, 1);
        let cut = self.scratch.cut.ptr();
        let (vocab, stride) = (self.vocab(), self.stride());
        let args = ScaleLogits {
            work,
            row_max: edited.max,
            temperature,
            min_p: self.param(self.arrays.min_p, 1),
            vocab,
            stride,
        };
        launcher.launch(self.kernels.scale_logits, self.by_split(), &args, || {
            self.by_logit(8, |needs| needs.draw)
        });
        let args = CutLogits {
            cut,
            work,
            temperature,
            top_k: self.param(self.arrays.top_k, 1),
            top_p: self.param(self.arrays.top_p, 1),
            vocab,
            stride,
        };
        launcher.launch(self.kernels.cut_logits, self.by_row(), &args, || {
            let cut = self.rows.iter().filter(|row| row.is_cut()).count();
            Work::bytes(4 * self.range.len() + 4 * cut * self.vocab)
        });
        let args = DrawPartials {
            draws: self.scratch.draws.ptr(),
            work,
            cut,
            temperature,
            seed: self.param(self.arrays.seed, 1),
            position: self.param(self.arrays.position, 1),
            vocab,
            stride,
        };
        launcher.launch(self.kernels.draw_partials, self.by_split(), &args, || {
            self.by_logit(4, |needs| needs.draw)
        });
    }

    fn choose_tokens(&self, launcher: &mut Launcher, raw: Stats, edited: Stats) {
        let (outputs, first) = (self.outputs, self.range.start);
        let args = ChooseTokens {
            token: outputs.ptr(outputs.shape.token(first)),
            status: outputs.ptr(outputs.shape.status(first)),
            draws: self.scratch.draws.ptr(),
            raw_status: raw.status,
            row_argmax: edited.argmax,
            row_status: edited.status,
            temperature: self.param(self.arrays.temperature, 1),
            given: self.param(self.arrays.given, 1),
            num_splits: self.num_splits(),
        };
        launcher.launch(self.kernels.choose_tokens, self.by_row(), &args, || {
            Work::bytes(self.range.len() * (8 * self.splits() + 28))
        });
    }

    /// Log-probabilities under the raw logits.
    fn logprobs(&self, launcher: &mut Launcher, raw: Stats) {
        let (vocab, stride) = (self.vocab(), self.stride());
        let (sums, top) = (self.scratch.sums.ptr(), self.scratch.top.ptr());
        let num_top = self.param(self.arrays.num_top, 1);
        let outputs = self.outputs;
        let (shape, first) = (outputs.shape, self.range.start);
        let max_top = as_i32(shape.max_top() as u64);
        let args = SumExp { sums, logits: self.logits, row_max: raw.max, vocab, stride };
        launcher.launch(self.kernels.sum_exp, self.by_split(), &args, || {
            self.by_logit(4, Needs::logprobs)
        });
        if self.needs.num_top > 0 {
            let args = TopPartials { top, logits: self.logits, num_top, max_top, vocab, stride };
            launcher.launch(self.kernels.top_partials, self.by_split(), &args, || {
                self.by_logit(4, |needs| needs.num_top > 0)
            });
        }
        let args = FoldLogprobs {
            logprob: outputs.ptr(shape.logprob(first)),
            top_ids: outputs.ptr(shape.top_id(first)),
            top_logprobs: outputs.ptr(shape.top_logprob(first)),
            logits: self.logits,
            token: outputs.ptr(shape.token(first)),
            row_max: raw.max,
            sums,
            top,
            num_top,
            max_top,
            num_splits: self.num_splits(),
            vocab,
            stride,
        };
        launcher.launch(self.kernels.fold_logprobs, self.by_row(), &args, || {
            let ranks = self.rows.iter().filter(|row| row.needs.logprobs());
            let ranks: usize = ranks.map(|row| 1 + row.needs.num_top as usize).sum();
            Work::bytes(8 * self.splits() * ranks)
        });
    }
}
