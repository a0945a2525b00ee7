//! Memory of a device, and page-locked memory of the host.

use std::cell::Cell;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;

use bytemuck::Pod;
use quire_kernels_ptx::{DevicePtr, Element};

use super::context::Context;
use super::event::Event;
use super::stream::StreamId;
use crate::backend::cuda::error::CudaError;

/// What the driver aligns every allocation to, at least.
const ALIGNMENT: u64 = 256;

/// Memory of the device. Freed with the value, once the device has done what it was given before.
pub(crate) struct DeviceBuffer {
    context: Context,
    /// 0 where there are no bytes.
    address: u64,
    bytes: usize,
}

impl Context {
    /// Allocates device memory, aligned to 256 bytes at least; what it holds is unspecified. No
    /// bytes are no allocation, at the address 0.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], which names `what` it was for.
    pub(crate) fn alloc(&self, bytes: usize, what: &str) -> Result<DeviceBuffer, CudaError> {
        let mut address = 0;
        if bytes > 0 {
            // SAFETY: the address is written to at most.
            unsafe { self.driver()?.cuMemAlloc_v2(&mut address, bytes) }.map_err(|error| {
                match error {
                    CudaError::OutOfMemory { free, .. } => {
                        CudaError::OutOfMemory { what: what.to_owned(), bytes, free }
                    }
                    error => error,
                }
            })?;
            assert!(address.is_multiple_of(ALIGNMENT), "the driver allocates at {address:#x}");
        }
        Ok(DeviceBuffer { context: self.clone(), address, bytes })
    }

    /// Allocates page-locked host memory, all zeros.
    ///
    /// # Errors
    /// [`CudaError::HostMemory`], which names `what` it was for.
    pub(crate) fn alloc_pinned(&self, bytes: usize, what: &str) -> Result<PinnedBuffer, CudaError> {
        let last_copy = self.event()?;
        let mut data: *mut c_void = std::ptr::null_mut();
        if bytes > 0 {
            // SAFETY: the pointer is written to at most.
            unsafe { self.driver()?.cuMemHostAlloc(&mut data, bytes, 0) }.map_err(|error| {
                match error {
                    CudaError::OutOfMemory { .. } => {
                        CudaError::HostMemory { what: what.to_owned(), bytes }
                    }
                    error => error,
                }
            })?;
        }
        let data = NonNull::new(data.cast()).unwrap_or(Nothing::AT);
        // SAFETY: as many bytes were allocated. Rust may read them only after they are written.
        unsafe { data.write_bytes(0, bytes) };
        Ok(PinnedBuffer {
            context: self.clone(),
            data,
            bytes,
            last_copy,
            copied_by: Cell::new(None),
        })
    }
}

impl DeviceBuffer {
    /// Its size.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where it begins; 0 where it has no bytes.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// The buffer as an array.
    pub(crate) fn ptr<T: Element>(&self) -> DevicePtr<T> {
        DevicePtr::new(self.address)
    }

    /// The array that begins `byte_offset` into the buffer, which is inside of it or its end, and a
    /// multiple of the element's size.
    pub(crate) fn ptr_at<T: Element>(&self, byte_offset: usize) -> DevicePtr<T> {
        assert!(byte_offset <= self.bytes, "byte {byte_offset} of {}", self.bytes);
        let size = size_of::<T>();
        assert!(byte_offset.is_multiple_of(size), "byte {byte_offset} in elements of {size} bytes");
        DevicePtr::new(self.address + byte_offset as u64)
    }

    /// The address of a range, which is inside.
    pub(super) fn range(&self, range: &Range<usize>) -> u64 {
        assert_inside(range, self.bytes);
        self.address + range.start as u64
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let Ok(driver) = self.context.driver() else { return };
        // SAFETY: allocated by `alloc`, freed here alone; waits for the work that may use it.
        let _ = unsafe { driver.cuMemFree_v2(self.address) };
    }
}

/// Page-locked host memory, which copies read and write while the host goes on.
///
/// It keeps the event of its last copy: whoever asks for its bytes waits for that first, so it
/// cannot be reused too early. A copy on one stream waits for those on others, so the last copy is
/// always the last to end.
pub(crate) struct PinnedBuffer {
    context: Context,
    data: NonNull<u8>,
    bytes: usize,
    last_copy: Event,
    /// The stream of the last copy, unless that is known to have ended.
    copied_by: Cell<Option<StreamId>>,
}

// SAFETY: the memory is its own, and is reached through it alone.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// Its size.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// The bytes, once no copy is under way.
    pub(crate) fn bytes(&self) -> Result<&[u8], CudaError> {
        self.wait()?;
        // SAFETY: allocated and initialised; no copy writes it, and another needs `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.bytes) })
    }

    /// The bytes, once no copy is under way.
    pub(crate) fn bytes_mut(&mut self) -> Result<&mut [u8], CudaError> {
        self.wait()?;
        // SAFETY: allocated and initialised; no copy reads or writes it, and this is the only
        // reference.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.bytes) })
    }

    /// The elements, once no copy is under way. The size is a multiple of theirs.
    pub(crate) fn as_slice<T: Pod>(&self) -> Result<&[T], CudaError> {
        Ok(bytemuck::cast_slice(self.bytes()?))
    }

    /// The elements, once no copy is under way. The size is a multiple of theirs.
    pub(crate) fn as_mut_slice<T: Pod>(&mut self) -> Result<&mut [T], CudaError> {
        Ok(bytemuck::cast_slice_mut(self.bytes_mut()?))
    }

    fn wait(&self) -> Result<(), CudaError> {
        if self.copied_by.get().is_some() {
            self.last_copy.synchronize()?;
            self.copied_by.set(None);
        }
        Ok(())
    }

    /// The pointer to a range, which is inside.
    pub(super) fn range(&mut self, range: &Range<usize>) -> *mut u8 {
        assert_inside(range, self.bytes);
        // SAFETY: inside of the allocation, or its end.
        unsafe { self.data.as_ptr().add(range.start) }
    }

    /// The stream of the last copy, if it may be under way, and the event at its end.
    pub(super) fn last_copy(&self) -> (Option<StreamId>, &Event) {
        (self.copied_by.get(), &self.last_copy)
    }

    /// A copy on that stream is under way and ends with the event.
    pub(super) fn set_copied_by(&mut self, stream: StreamId) {
        self.copied_by.set(Some(stream));
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.wait().is_err() {
            // Nobody is left to tell. Should this fail, too, the context is lost, and no copy goes
            // on after that.
            let _ = self.context.synchronize();
        }
        if self.bytes == 0 {
            return;
        }
        let Ok(driver) = self.context.driver() else { return };
        // SAFETY: allocated by `alloc_pinned`, freed here alone; no copy is under way.
        let _ = unsafe { driver.cuMemFreeHost(self.data.as_ptr().cast()) };
    }
}

/// Where no bytes are, aligned for every element.
#[repr(align(256))]
struct Nothing;

impl Nothing {
    const AT: NonNull<u8> = NonNull::<Nothing>::dangling().cast();
}

pub(super) fn assert_inside(range: &Range<usize>, bytes: usize) {
    assert!(range.start <= range.end && range.end <= bytes, "bytes {range:?} of {bytes}");
}
