//! Arrays of a step on their way to the device: written next to each other into page-locked memory
//! and copied at once.

use super::driver::{Context, DeviceBuffer, PinnedBuffer, Stream};
use super::error::CudaError;
use bytemuck::Pod;
use quire_kernels_ptx::{DevicePtr, Element};
use std::marker::PhantomData;

/// What each array begins at a multiple of, in bytes.
const ALIGN: usize = 16;
/// Copies that may be under way while the next arrays are written.
const STAGES: usize = 2;

/// Where an array of `T` is in an [`Arena`].
#[derive(Debug)]
pub(super) struct Array<T> {
    at: usize,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for Array<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Array<T> {}

impl<T> Default for Array<T> {
    fn default() -> Self {
        Array { at: 0, len: 0, element: PhantomData }
    }
}

/// The places of arrays, one after the other.
#[derive(Default)]
pub(super) struct Layout {
    bytes: usize,
}

impl Layout {
    /// The next array, of `len` elements.
    pub fn array<T>(&mut self, len: usize) -> Array<T> {
        let at = self.bytes;
        self.bytes = (at + len * size_of::<T>()).next_multiple_of(ALIGN);
        Array { at, len, element: PhantomData }
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Device memory for a step's arrays, at the same place in every step of the same layout.
pub(super) struct Arena {
    context: Context,
    device: DeviceBuffer,
    staging: [PinnedBuffer; STAGES],
    turn: usize,
    what: &'static str,
}

impl Arena {
    /// Room for `bytes`, here and on the device.
    pub fn new(context: &Context, bytes: usize, what: &'static str) -> Result<Self, CudaError> {
        let staging = || context.alloc_pinned(bytes, what);
        Ok(Arena {
            context: context.clone(),
            device: context.alloc(bytes, what)?,
            staging: [staging()?, staging()?],
            turn: 0,
            what,
        })
    }

    /// Makes room for `layout` and no more.
    pub fn reserve(&mut self, layout: &Layout) -> Result<(), CudaError> {
        *self = Arena::new(&self.context, layout.bytes(), self.what)?;
        Ok(())
    }

    /// Makes room for `layout`, more than it needs now. True: the arrays have moved.
    pub fn fit(&mut self, layout: &Layout) -> Result<bool, CudaError> {
        if layout.bytes() <= self.device.bytes() {
            return Ok(false);
        }
        // What is under way reads the arrays where they are.
        self.context.synchronize()?;
        *self = Arena::new(&self.context, layout.bytes().next_power_of_two(), self.what)?;
        Ok(true)
    }

    /// Where the next step's arrays are written; waits for a copy that still reads it.
    pub fn staging(&mut self) -> Result<Staging<'_>, CudaError> {
        self.turn = (self.turn + 1) % STAGES;
        Ok(Staging { bytes: self.staging[self.turn].bytes_mut()? })
    }

    /// Copies what was written, `layout` in all, to the device.
    pub fn upload(&mut self, stream: &Stream, layout: &Layout) -> Result<(), CudaError> {
        if layout.bytes() == 0 {
            return Ok(());
        }
        stream.upload(&mut self.staging[self.turn], 0..layout.bytes(), &self.device, 0)
    }

    /// The device's copy of an array.
    pub fn ptr<T: Element>(&self, array: Array<T>) -> DevicePtr<T> {
        self.device.ptr_at(array.at)
    }
}

/// Page-locked memory, seen as arrays.
pub(super) struct Staging<'a> {
    bytes: &'a mut [u8],
}

impl Staging<'_> {
    /// The elements of `array`, which hold whatever was there.
    pub fn get<T: Pod>(&mut self, array: Array<T>) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.bytes[array.at..][..array.len * size_of::<T>()])
    }
}
