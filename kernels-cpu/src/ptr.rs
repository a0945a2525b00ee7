//! A pointer that crosses into the workers of one kernel call.

use std::marker::PhantomData;

/// A mutable slice that workers write in disjoint parts.
#[derive(Clone, Copy)]
pub(crate) struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: access is only through `slice`, whose callers keep the parts disjoint.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Shares `slice` for as long as it is borrowed.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), lifetime: PhantomData }
    }

    /// Elements `start..start + len`.
    ///
    /// # Safety
    /// The part overlaps no other part that is in use.
    #[inline(always)]
    pub(crate) unsafe fn slice(self, start: usize, len: usize) -> &'a mut [T] {
        assert!(
            start <= self.len && len <= self.len - start,
            "part {start}+{len} of {} elements",
            self.len
        );
        // SAFETY: in bounds, and disjoint from other parts by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }

    /// Copies elements `from..from + len` over `to..to + len`.
    ///
    /// # Safety
    /// The parts do not overlap; nobody writes the first or uses the second meanwhile.
    pub(crate) unsafe fn copy(self, from: usize, to: usize, len: usize)
    where
        T: Copy,
    {
        for part in [from, to] {
            assert!(
                part <= self.len && len <= self.len - part,
                "part {part}+{len} of {} elements",
                self.len
            );
        }
        // SAFETY: in bounds, and disjoint from each other and from other parts by the contract.
        unsafe { self.start.add(from).copy_to_nonoverlapping(self.start.add(to), len) };
    }
}
