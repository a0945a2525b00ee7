//! Blocks to the host and back.
//!
//! A kernel gathers blocks into a buffer, from where one copy a run of neighbours takes them to the
//! host, on a stream of its own: the stream that computes waits for the gathering alone. The way
//! back is the same. There are two buffers, so that one is filled while the other is emptied.

use super::arena::{Arena, Layout};
use super::driver::{DeviceBuffer, Event, Stream};
use super::element::Compute;
use super::error::CudaError;
use super::launcher::{Kernel, Launcher, Work};
use super::tensors::{CudaHostCache, CudaKvCache, layer_block_bytes};
use crate::ops::KvLayout;
use quire_kernels_ptx::DevicePtr;
use quire_kernels_ptx::launch::{SwapIn, SwapOut};
use std::ops::Range;

/// Bytes of a buffer, unless one block is larger.
const BUFFER_BYTES: usize = 32 << 20;
/// Bytes of a word, in which blocks are moved.
const WORD: usize = 4;

/// A buffer on the way.
struct Buffer {
    device: DeviceBuffer,
    /// It is filled.
    filled: Event,
    /// It is emptied.
    emptied: Event,
}

/// Moves blocks.
pub(super) struct Swap {
    stream: Stream,
    swap_out: Kernel<SwapOut>,
    swap_in: Kernel<SwapIn>,
    blocks: Arena,
    /// Two, from the first host cache on.
    buffers: Vec<Buffer>,
    /// Bytes of a buffer, unless one block is larger.
    buffer_bytes: usize,
    turn: usize,
}

impl Swap {
    pub fn new(launcher: &mut Launcher) -> Result<Self, CudaError> {
        let context = launcher.context().clone();
        Ok(Swap {
            stream: context.stream()?,
            swap_out: launcher.select(&[])?,
            swap_in: launcher.select(&[])?,
            blocks: Arena::new(&context, 0, "the list of swapped blocks")?,
            buffers: Vec::new(),
            buffer_bytes: BUFFER_BYTES,
            turn: 0,
        })
    }

    /// Makes the buffers smaller.
    pub fn limit_buffers(&mut self, bytes: usize) {
        self.buffer_bytes = self.buffer_bytes.min(bytes);
    }

    /// Allocates the buffers, for blocks of `layout`.
    pub fn reserve(&mut self, launcher: &Launcher, layout: &KvLayout) -> Result<(), CudaError> {
        let block = layout.num_layers * layer_block_bytes(layout);
        let (context, what) = (launcher.context(), "blocks being swapped");
        let buffer = || -> Result<Buffer, CudaError> {
            Ok(Buffer {
                device: context.alloc(buffer_bytes(block, self.buffer_bytes), what)?,
                filled: context.event()?,
                emptied: context.event()?,
            })
        };
        self.buffers = vec![buffer()?, buffer()?];
        Ok(())
    }

    /// Copies blocks (of the cache, of the host) to the host.
    pub fn swap_out<T: Compute>(
        &mut self,
        launcher: &mut Launcher,
        kv: &CudaKvCache<T>,
        host: &mut CudaHostCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), CudaError> {
        let at_once = self.blocks_at_once(host);
        let sources = self.list(launcher, pairs.iter().map(|pair| pair.0))?;
        for (i, pairs) in pairs.chunks(at_once).enumerate() {
            let buffer = self.next_buffer();
            launcher.stream().wait(&self.buffers[buffer].emptied)?;
            let blocks = sources.from(i * at_once);
            let Buffer { device, filled, emptied } = &self.buffers[buffer];
            let args = SwapOut {
                staging: device.ptr(),
                cache: kv.buffer.ptr(),
                blocks,
                num_blocks: kv.layout.num_blocks as i32,
                block_words: (layer_block_bytes(&kv.layout) / WORD) as i32,
            };
            let grid = grid(self.swap_out.tile("BLOCK"), &kv.layout, pairs.len());
            let work = || Work::bytes(2 * pairs.len() * host.block_bytes);
            launcher.launch(self.swap_out, grid, &args, work);
            launcher.take_failure()?;
            launcher.stream().record(filled)?;
            self.stream.wait(filled)?;
            for run in runs(pairs.iter().map(|pair| pair.1)) {
                let at = run.blocks.start as usize * host.block_bytes;
                let range = bytes(&run, host.block_bytes);
                self.stream.download(device, range, &mut host.buffer, at)?;
            }
            self.stream.record(emptied)?;
        }
        Ok(())
    }

    /// Copies blocks (of the host, of the cache) from the host.
    pub fn swap_in<T: Compute>(
        &mut self,
        launcher: &mut Launcher,
        kv: &CudaKvCache<T>,
        host: &mut CudaHostCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), CudaError> {
        let at_once = self.blocks_at_once(host);
        let targets = self.list(launcher, pairs.iter().map(|pair| pair.1))?;
        for (i, pairs) in pairs.chunks(at_once).enumerate() {
            let buffer = self.next_buffer();
            self.stream.wait(&self.buffers[buffer].emptied)?;
            for run in runs(pairs.iter().map(|pair| pair.0)) {
                let from = run.blocks.start as usize * host.block_bytes;
                let to = bytes(&run, host.block_bytes);
                let device = &self.buffers[buffer].device;
                self.stream.upload(&mut host.buffer, from..from + to.len(), device, to.start)?;
            }
            let blocks = targets.from(i * at_once);
            let Buffer { device, filled, emptied } = &self.buffers[buffer];
            self.stream.record(filled)?;
            launcher.stream().wait(filled)?;
            let args = SwapIn {
                cache: kv.buffer.ptr(),
                staging: device.ptr(),
                blocks,
                num_blocks: kv.layout.num_blocks as i32,
                block_words: (layer_block_bytes(&kv.layout) / WORD) as i32,
            };
            let grid = grid(self.swap_in.tile("BLOCK"), &kv.layout, pairs.len());
            let work = || Work::bytes(2 * pairs.len() * host.block_bytes);
            launcher.launch(self.swap_in, grid, &args, work);
            launcher.take_failure()?;
            launcher.stream().record(emptied)?;
        }
        Ok(())
    }

    /// Blocks that fill a buffer.
    fn blocks_at_once(&self, host: &CudaHostCache) -> usize {
        // Without a host cache there are no buffers, and nothing is swapped.
        let bytes = self.buffers.first().map_or(0, |buffer| buffer.device.bytes());
        (bytes / host.block_bytes).max(1)
    }

    fn next_buffer(&mut self) -> usize {
        self.turn = 1 - self.turn;
        self.turn
    }

    /// Pairs of blocks, put on the device.
    pub fn pairs(
        &mut self,
        launcher: &Launcher,
        pairs: &[(u32, u32)],
    ) -> Result<DevicePtr<i32>, CudaError> {
        Ok(self.list(launcher, pairs.iter().flat_map(|pair| [pair.0, pair.1]))?.from(0))
    }

    /// Block ids, put on the device; the next list takes their place.
    fn list(
        &mut self,
        launcher: &Launcher,
        ids: impl Iterator<Item = u32> + Clone,
    ) -> Result<List, CudaError> {
        let mut layout = Layout::default();
        let len = ids.clone().count();
        let list = layout.array::<i32>(len);
        if len == 0 {
            return Ok(List(DevicePtr::null()));
        }
        self.blocks.fit(&layout)?;
        let mut staging = self.blocks.staging()?;
        for (out, id) in staging.get(list).iter_mut().zip(ids) {
            *out = id as i32;
        }
        self.blocks.upload(launcher.stream(), &layout)?;
        Ok(List(self.blocks.ptr(list)))
    }
}

/// Device bytes for swapping blocks of `block_bytes`, all layers.
pub(super) fn device_bytes(block_bytes: usize) -> usize {
    2 * buffer_bytes(block_bytes, BUFFER_BYTES)
}

/// Whole blocks in `most` bytes, at least one.
fn buffer_bytes(block_bytes: usize, most: usize) -> usize {
    block_bytes.max(most / block_bytes.max(1) * block_bytes)
}

pub(super) fn grid(block: usize, layout: &KvLayout, num_blocks: usize) -> [usize; 3] {
    [num_blocks, (layer_block_bytes(layout) / WORD).div_ceil(block), layout.num_layers]
}

/// Block ids on the device.
struct List(DevicePtr<i32>);

impl List {
    /// Those from entry `first` on.
    fn from(&self, first: usize) -> DevicePtr<i32> {
        DevicePtr::new(self.0.address() + (first * size_of::<i32>()) as u64)
    }
}

/// Host blocks that are neighbours, and where the first is in the list.
struct Run {
    at: usize,
    blocks: Range<u32>,
}

fn runs(ids: impl Iterator<Item = u32>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (at, id) in ids.enumerate() {
        match runs.last_mut() {
            Some(run) if run.blocks.end == id => run.blocks.end += 1,
            _ => runs.push(Run { at, blocks: id..id + 1 }),
        }
    }
    runs
}

/// The bytes of a run in the buffer.
fn bytes(run: &Run, block_bytes: usize) -> Range<usize> {
    run.at * block_bytes..(run.at + run.blocks.len()) * block_bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_copied_together() {
        let runs: Vec<_> = runs([3, 4, 5, 9, 2, 3].into_iter()).into_iter().collect();
        let parts: Vec<_> = runs.iter().map(|run| (run.at, run.blocks.clone())).collect();
        assert_eq!(parts, [(0, 3..6), (3, 9..10), (4, 2..4)]);
        assert_eq!(bytes(&runs[1], 10), 30..40);
    }
}
