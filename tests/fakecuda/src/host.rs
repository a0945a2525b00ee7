//! The program's own memory: page-locked allocations, which work reads and writes when it runs, and
//! buffers that a call is given. The only module that follows a program's pointers to data.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::slice;

use crate::code::{self, Result};
use crate::driver::Driver;
use crate::work::HostAddress;

/// What fresh page-locked memory holds, so that reading it early shows.
const FRESH: u8 = 0xff;

/// A page-locked allocation that the driver made.
#[derive(Debug)]
pub(crate) struct Pinned {
    layout: Layout,
}

impl Pinned {
    pub fn bytes(&self) -> usize {
        self.layout.size()
    }
}

impl Driver {
    pub fn alloc_pinned(&mut self, bytes: usize) -> Result<usize> {
        let layout = Layout::from_size_align(bytes, 4096).ok().filter(|_| bytes > 0);
        let layout = layout.ok_or(code::INVALID_VALUE)?;
        // SAFETY: the layout is not empty.
        let start = unsafe { if self.config.null { alloc_zeroed(layout) } else { alloc(layout) } };
        if start.is_null() {
            return Err(code::OUT_OF_MEMORY);
        }
        if !self.config.null {
            // SAFETY: `start` is a fresh allocation of `bytes` bytes.
            unsafe { start.write_bytes(FRESH, bytes) };
        }
        self.pinned.insert(start as usize, Pinned { layout });
        Ok(start as usize)
    }

    /// Gives page-locked memory back that starts at `address`.
    pub fn free_pinned(&mut self, address: usize) -> Result {
        let Pinned { layout } = self.pinned.remove(&address).ok_or(code::INVALID_VALUE)?;
        // SAFETY: `alloc_pinned` made it with this layout, and it has just left the table, so that
        // it is given back once and no work touches it any more.
        unsafe { dealloc(address as *mut u8, layout) };
        Ok(())
    }

    /// Whether all of the bytes are in one page-locked allocation.
    pub fn is_pinned(&self, address: usize, bytes: usize) -> bool {
        let before = self.pinned.range(..=address).next_back();
        before.is_some_and(|(start, found)| {
            let offset = address - start;
            offset.checked_add(bytes).is_some_and(|end| end <= found.bytes())
        })
    }

    /// The bytes as they are now. The memory may have been given back since a graph with this
    /// address was made.
    pub fn read_pinned(&self, HostAddress(address): HostAddress, bytes: usize) -> Result<Vec<u8>> {
        if !self.is_pinned(address, bytes) {
            eprintln!("fakecuda: a copy reads page-locked memory that was given back");
            return Err(code::ILLEGAL_ADDRESS);
        }
        // SAFETY: a live allocation of this driver holds the bytes, all of which `alloc_pinned`
        // wrote. The program must not write them while a copy of them is under way.
        Ok(unsafe { slice::from_raw_parts(address as *const u8, bytes) }.to_vec())
    }

    pub fn write_pinned(&self, HostAddress(address): HostAddress, data: &[u8]) -> Result {
        if !self.is_pinned(address, data.len()) {
            eprintln!("fakecuda: a copy writes page-locked memory that was given back");
            return Err(code::ILLEGAL_ADDRESS);
        }
        // SAFETY: a live allocation of this driver holds the bytes. The program must not touch them
        // while a copy to them is under way.
        unsafe { (address as *mut u8).copy_from_nonoverlapping(data.as_ptr(), data.len()) };
        Ok(())
    }
}

/// Copies what a call points to.
///
/// # Safety
/// `from` is null or points to `bytes` readable bytes.
pub(crate) unsafe fn read(from: *const u8, bytes: usize) -> Result<Vec<u8>> {
    if from.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: the caller's promise; it is not null.
    Ok(unsafe { slice::from_raw_parts(from, bytes) }.to_vec())
}

/// Copies to where a call points.
///
/// # Safety
/// `to` is null or points to as many writable bytes as `data` has.
pub(crate) unsafe fn write(to: *mut u8, data: &[u8]) -> Result {
    if to.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: the caller's promise; it is not null, and `data` is memory of this library.
    unsafe { to.copy_from_nonoverlapping(data.as_ptr(), data.len()) };
    Ok(())
}

/// Stores a result of a call.
///
/// # Safety
/// `to` is null or may be written.
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Result {
    if to.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: the caller's promise; it is not null.
    unsafe { to.write(value) };
    Ok(())
}
