//! The arrays of a step on the device.
//!
//! All of them are written next to each other and copied at once. Decode steps are padded to a few
//! sizes, so that the arrays of all steps of one [`Shape`] are at the same places and one graph
//! serves them. A padded row has no keys and writes none, so no block is set aside for it.

use super::arena::{Arena, Array, Layout};
use super::attention::SPLIT;
use super::driver::Context;
use super::error::CudaError;
use super::launcher::Launcher;
use crate::ops::{ForwardInput, StepLimits};
use quire_kernels_ptx::DevicePtr;

/// Decode steps of more sequences are not padded, and not in graphs.
const MAX_PADDED_SEQS: usize = 256;

/// Everything that the launches of a decode step depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// Sequences, padding included.
    pub num_seqs: usize,
    /// Splits of the longest, rounded up.
    pub num_splits: usize,
    /// Whether logits of any are wanted.
    pub has_logits: bool,
}

/// The places of a step's arrays.
#[derive(Clone, Copy, Default)]
struct Places {
    token_ids: Array<i32>,
    positions: Array<i32>,
    slots: Array<i64>,
    query_start_loc: Array<i32>,
    seq_lens: Array<i32>,
    logits_rows: Array<i32>,
    block_tables: Array<i32>,
    patch_places: Array<i32>,
    patch_rows: Array<i32>,
    tile_seqs: Array<i32>,
    tile_starts: Array<i32>,
}

/// How many there are in a step.
struct Counts {
    tokens: usize,
    seqs: usize,
    logits: usize,
    table_entries: usize,
    patches: usize,
    tiles: usize,
}

impl Places {
    fn new(counts: Counts) -> (Self, Layout) {
        let Counts { tokens, seqs, logits, table_entries, patches, tiles } = counts;
        let mut layout = Layout::default();
        let places = Places {
            token_ids: layout.array(tokens),
            positions: layout.array(tokens),
            slots: layout.array(tokens),
            query_start_loc: layout.array(seqs + 1),
            seq_lens: layout.array(seqs),
            logits_rows: layout.array(logits),
            block_tables: layout.array(table_entries),
            patch_places: layout.array(patches),
            patch_rows: layout.array(patches),
            tile_seqs: layout.array(tiles),
            tile_starts: layout.array(tiles),
        };
        (places, layout)
    }
}

/// A step's metadata, here and on the device.
pub(super) struct StepArrays {
    arena: Arena,
    places: Places,
    /// `(sequence, first new row)` of the prefill kernel's tiles.
    tiles: Vec<(i32, i32)>,
    limits: Option<StepLimits>,
    /// New rows of a tile.
    tile_rows: usize,
    /// Tokens, padding included.
    pub num_tokens: usize,
    /// Sequences, padding included.
    pub num_seqs: usize,
    /// Rows of logits, padding included.
    pub num_logits: usize,
    /// Entries of a block table.
    pub table_stride: usize,
    /// Splits of the longest sequence with one new row; 0 where there is none.
    pub num_splits: usize,
    /// Tiles of the sequences with several new rows.
    pub num_tiles: usize,
    /// There may be padded rows, as in every step of the same shape.
    pub is_padded: bool,
    /// Placeholders to be filled.
    pub num_patches: usize,
    /// Keys read, (row, key) pairs and rows of the sequences with one new row.
    pub decode_work: (usize, usize, usize),
    /// The same of the others.
    pub prefill_work: (usize, usize, usize),
}

/// What [`StepArrays::write`] found.
pub(super) struct Written {
    /// The shape of a decode step that a graph can serve.
    pub shape: Option<Shape>,
    /// The arrays are elsewhere than in earlier steps.
    pub moved: bool,
}

impl StepArrays {
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        Ok(StepArrays {
            arena: Arena::new(context, 0, "the step's input")?,
            places: Places::default(),
            tiles: Vec::new(),
            limits: None,
            tile_rows: 1,
            num_tokens: 0,
            num_seqs: 0,
            num_logits: 0,
            table_stride: 0,
            num_splits: 0,
            num_tiles: 0,
            is_padded: false,
            num_patches: 0,
            decode_work: (0, 0, 0),
            prefill_work: (0, 0, 0),
        })
    }

    /// Makes room for steps within `limits`; a tile has `tile_rows` new rows.
    pub fn reserve(&mut self, limits: &StepLimits, tile_rows: usize) -> Result<(), CudaError> {
        self.limits = Some(*limits);
        self.tile_rows = tile_rows;
        self.arena.reserve(&largest_layout(limits))
    }

    /// Copies a step's arrays to the device. `pad`: a decode step may get padded rows.
    pub fn write(
        &mut self,
        launcher: &mut Launcher,
        input: &ForwardInput,
        block_size: usize,
        pad: bool,
    ) -> Result<Written, CudaError> {
        self.count(input);
        let shape = self.shape(input).filter(|_| pad);
        self.table_stride = input.max_blocks.max(1);
        self.num_logits = input.logits_indices.len();
        (self.num_tokens, self.num_seqs) = (input.num_tokens(), input.num_seqs());
        self.is_padded = shape.is_some();
        if let Some(shape) = shape {
            (self.num_tokens, self.num_seqs) = (shape.num_seqs, shape.num_seqs);
            self.num_logits = if shape.has_logits { shape.num_seqs } else { 0 };
            self.num_splits = shape.num_splits;
            self.table_stride = (shape.num_splits * SPLIT).div_ceil(block_size);
        }
        let layout = self.place();
        let moved = self.arena.fit(&layout)?;
        self.fill(input)?;
        self.arena.upload(launcher.stream(), &layout)?;
        Ok(Written { shape, moved })
    }

    /// Splits, tiles and work of the sequences.
    fn count(&mut self, input: &ForwardInput) {
        self.num_splits = 0;
        self.tiles.clear();
        (self.decode_work, self.prefill_work) = ((0, 0, 0), (0, 0, 0));
        for (seq, &len) in input.seq_lens.iter().enumerate() {
            let rows = (input.query_start_loc[seq + 1] - input.query_start_loc[seq]) as usize;
            let len = len as usize;
            // Row r sees len − rows + r + 1 keys.
            let pairs = rows * (len - rows) + rows * (rows + 1) / 2;
            let work = if rows == 1 { &mut self.decode_work } else { &mut self.prefill_work };
            *work = (work.0 + len, work.1 + pairs, work.2 + rows);
            if rows == 1 {
                self.num_splits = self.num_splits.max(len.div_ceil(SPLIT));
            } else {
                let starts = (0..rows).step_by(self.tile_rows);
                self.tiles.extend(starts.map(|start| (seq as i32, start as i32)));
            }
        }
        self.num_tiles = self.tiles.len();
        self.num_patches = input.placeholders.len();
    }

    /// The shape of a step in which every sequence has one new row.
    fn shape(&self, input: &ForwardInput) -> Option<Shape> {
        let limits = self.limits.as_ref()?;
        let num_seqs = input.num_seqs();
        let fits = input.num_tokens() == num_seqs
            && num_seqs <= MAX_PADDED_SEQS.min(limits.max_tokens)
            && input.placeholders.len() <= num_seqs;
        fits.then(|| Shape {
            num_seqs: padded_seqs(num_seqs).min(limits.max_tokens),
            num_splits: self.num_splits.next_power_of_two(),
            has_logits: !input.logits_indices.is_empty(),
        })
    }

    /// Decides where the arrays are.
    fn place(&mut self) -> Layout {
        let (places, layout) = Places::new(Counts {
            tokens: self.num_tokens,
            seqs: self.num_seqs,
            logits: self.num_logits,
            table_entries: self.num_seqs * self.table_stride,
            patches: self.num_patches,
            tiles: self.num_tiles,
        });
        self.places = places;
        layout
    }

    fn fill(&mut self, input: &ForwardInput) -> Result<(), CudaError> {
        let places = self.places;
        let mut staging = self.arena.staging()?;
        let (real_tokens, real_seqs) = (input.num_tokens(), input.num_seqs());
        fill(staging.get(places.token_ids), input.token_ids.iter().map(|&id| id as i32), 0);
        fill(staging.get(places.positions), input.positions.iter().map(|&p| p as i32), 0);
        fill(staging.get(places.slots), input.slot_mapping.iter().copied(), -1);
        let starts = staging.get(places.query_start_loc);
        starts[..=real_seqs].copy_from_slice(&input.query_start_loc);
        for (i, start) in starts[real_seqs..].iter_mut().enumerate() {
            *start = (real_tokens + i) as i32;
        }
        fill(staging.get(places.seq_lens), input.seq_lens.iter().copied(), 0);
        let rows = input.logits_indices.iter().map(|&row| row as i32);
        fill(staging.get(places.logits_rows), rows, 0);
        // A shorter table is all that a shape's splits can see.
        let used = self.table_stride.min(input.max_blocks);
        let tables = staging.get(places.block_tables).chunks_exact_mut(self.table_stride);
        let max_blocks = input.max_blocks.max(1);
        for (table, source) in tables.zip(input.block_table.chunks_exact(max_blocks)) {
            table[..used].copy_from_slice(&source[..used]);
        }
        let placeholders = || input.placeholders.iter();
        fill(staging.get(places.patch_places), placeholders().map(|p| p.0 as i32), 0);
        fill(staging.get(places.patch_rows), placeholders().map(|p| p.1 as i32), 0);
        fill(staging.get(places.tile_seqs), self.tiles.iter().map(|tile| tile.0), 0);
        fill(staging.get(places.tile_starts), self.tiles.iter().map(|tile| tile.1), 0);
        Ok(())
    }

    /// `[T]`
    pub fn token_ids(&self) -> DevicePtr<i32> {
        self.arena.ptr(self.places.token_ids)
    }

    /// `[T]`
    pub fn positions(&self) -> DevicePtr<i32> {
        self.arena.ptr(self.places.positions)
    }

    /// `[T]`
    pub fn slots(&self) -> DevicePtr<i64> {
        self.arena.ptr(self.places.slots)
    }

    /// `[S + 1]`
    pub fn query_start_loc(&self) -> DevicePtr<i32> {
        self.arena.ptr(self.places.query_start_loc)
    }

    /// `[S]`
    pub fn seq_lens(&self) -> DevicePtr<i32> {
        self.arena.ptr(self.places.seq_lens)
    }

    /// `[R]`, from row `first` on.
    pub fn logits_rows(&self, first: usize) -> DevicePtr<i32> {
        let rows = self.arena.ptr(self.places.logits_rows);
        DevicePtr::new(rows.address() + (first * size_of::<i32>()) as u64)
    }

    /// `[S, table_stride]`
    pub fn block_tables(&self) -> DevicePtr<i32> {
        self.arena.ptr(self.places.block_tables)
    }

    /// Places and rows of the placeholders.
    pub fn patches(&self) -> (DevicePtr<i32>, DevicePtr<i32>) {
        (self.arena.ptr(self.places.patch_places), self.arena.ptr(self.places.patch_rows))
    }

    /// `[num_tiles]`
    pub fn tile_seqs(&self) -> DevicePtr<i32> {
        self.arena.ptr(self.places.tile_seqs)
    }

    /// `[num_tiles]`
    pub fn tile_starts(&self) -> DevicePtr<i32> {
        self.arena.ptr(self.places.tile_starts)
    }
}

/// Device bytes of a step's arrays; `None`: more than can be addressed.
pub(super) fn bytes(limits: &StepLimits) -> Option<usize> {
    // Only the block tables can be large.
    let blocks = limits.max_positions.checked_add(SPLIT)?.div_ceil(limits.block_size);
    limits.max_seqs.checked_mul(blocks)?.checked_mul(size_of::<i32>())?;
    Some(largest_layout(limits).bytes())
}

/// The arrays of a step that is as large as it can be.
fn largest_layout(limits: &StepLimits) -> Layout {
    let seqs = padded_seqs(limits.max_seqs);
    let splits = limits.max_positions.div_ceil(SPLIT).next_power_of_two();
    let counts = Counts {
        tokens: limits.max_tokens,
        seqs,
        logits: limits.max_tokens,
        table_entries: seqs * (splits * SPLIT).div_ceil(limits.block_size),
        patches: seqs,
        // Each has a token.
        tiles: limits.max_tokens,
    };
    Places::new(counts).1
}

/// `n` rounded up to a number of sequences that graphs are made for: 1, 2, 4, multiples of 8.
fn padded_seqs(n: usize) -> usize {
    if n <= 4 { n.next_power_of_two() } else { n.next_multiple_of(8) }
}

/// Fills `out` with `values` and then `rest`.
fn fill<T: Copy>(out: &mut [T], values: impl ExactSizeIterator<Item = T>, rest: T) {
    let (head, tail) = out.split_at_mut(values.len());
    for (out, value) in head.iter_mut().zip(values) {
        *out = value;
    }
    tail.fill(rest);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_padded_to_few_sizes() {
        let sizes = [1, 2, 3, 4, 5, 8, 9, 16, 17, 250, 256].map(padded_seqs);
        assert_eq!(sizes, [1, 2, 4, 4, 8, 8, 16, 16, 24, 256, 256]);
    }
}
