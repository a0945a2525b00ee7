//! Zeroed, aligned word buffers straight from the system, on huge pages where they pay.

use memmap2::{MmapMut, MmapRaw};
use std::sync::Arc;

/// Huge page size, and the alignment of buffers of at least one huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Size of the regions an [`Arena`] cuts its buffers from.
const ARENA_REGION: usize = 64 << 20;

/// Alignment of a buffer within a region: a cache line.
const LINE: usize = 64;

/// The system refused memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot allocate {bytes} bytes")]
pub struct AllocError {
    /// Bytes asked for; `usize::MAX` where the size does not fit in an address.
    pub bytes: usize,
}

/// A zeroed buffer of `u32` words: page-aligned, or 2 MiB-aligned and advised to use huge pages
/// from 2 MiB on, or a piece of an [`Arena`]. Untouched pages take no memory.
pub struct Words {
    region: Arc<Region>,
    /// Byte offset of the first word in the region.
    offset: usize,
    len: usize,
}

/// Zeroed memory from the system.
struct Region {
    map: MmapRaw,
    /// Byte offset of the first aligned byte of `map`.
    start: usize,
    bytes: usize,
    huge_pages: bool,
}

impl Region {
    fn new(bytes: usize) -> Result<Self, AllocError> {
        let huge = bytes >= HUGE_PAGE;
        let padded = bytes.checked_add(if huge { HUGE_PAGE } else { 1 });
        let map = padded
            .filter(|&size| isize::try_from(size).is_ok())
            .and_then(|size| MmapMut::map_anon(size).ok())
            .ok_or(AllocError { bytes })?;
        let start = if huge { map.as_ptr().align_offset(HUGE_PAGE) } else { 0 };
        assert!(start <= map.len() - bytes, "alignment offset {start} exceeds the padding");
        let huge_pages = huge && advise_huge(&map);
        Ok(Self { map: map.into(), start, bytes, huge_pages })
    }
}

impl Words {
    /// A buffer of `len` zero words.
    pub fn zeroed(len: usize) -> Result<Self, AllocError> {
        let region = Arc::new(Region::new(bytes_of(len)?)?);
        Ok(Self { offset: region.start, region, len })
    }

    /// Number of words.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no words.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether huge pages were asked for and the system accepted.
    pub fn huge_pages_requested(&self) -> bool {
        self.region.huge_pages
    }

    /// The words.
    pub fn as_slice(&self) -> &[u32] {
        // SAFETY: the words lie in the region, which lives as long as `self`; they are aligned and
        // were zeroed by the system. No other `Words` has any of them.
        unsafe { std::slice::from_raw_parts(self.first(), self.len) }
    }

    /// The words.
    pub fn as_mut_slice(&mut self) -> &mut [u32] {
        // SAFETY: as for `as_slice`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.first(), self.len) }
    }

    fn first(&self) -> *mut u32 {
        self.region.map.as_mut_ptr().wrapping_add(self.offset).cast()
    }
}

/// Hands out buffers that lie close together, so that those smaller than a huge page get onto huge
/// pages too.
#[derive(Default)]
pub struct Arena {
    region: Option<Arc<Region>>,
    /// Bytes of the region that are handed out.
    used: usize,
}

impl Arena {
    /// A buffer of `len` zero words, aligned to a cache line.
    pub fn zeroed(&mut self, len: usize) -> Result<Words, AllocError> {
        let bytes = bytes_of(len)?;
        if bytes > ARENA_REGION / 4 {
            return Words::zeroed(len);
        }
        let region = match &self.region {
            Some(region) if bytes <= region.bytes - self.used => Arc::clone(region),
            _ => {
                self.used = 0;
                Arc::clone(self.region.insert(Arc::new(Region::new(ARENA_REGION)?)))
            }
        };
        let offset = region.start + self.used;
        self.used = region.bytes.min((self.used + bytes).next_multiple_of(LINE));
        Ok(Words { region, offset, len })
    }
}

fn bytes_of(len: usize) -> Result<usize, AllocError> {
    len.checked_mul(4).ok_or(AllocError { bytes: usize::MAX })
}

#[cfg(target_os = "linux")]
fn advise_huge(map: &MmapMut) -> bool {
    map.advise(memmap2::Advice::HugePage).is_ok()
}

#[cfg(not(target_os = "linux"))]
fn advise_huge(_: &MmapMut) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeroed_aligned_and_writable() {
        for (len, align) in [(0, 64), (1, 64), (1000, 64), (HUGE_PAGE / 4 + 3, HUGE_PAGE)] {
            let mut words = Words::zeroed(len).unwrap();
            assert_eq!((words.len(), words.is_empty()), (len, len == 0));
            assert_eq!(words.as_slice().as_ptr() as usize % align, 0, "{len} words");
            assert!(words.as_slice().iter().all(|&w| w == 0));
            words.as_mut_slice().fill(7);
            assert!(words.as_slice().iter().all(|&w| w == 7));
        }
    }

    #[test]
    fn buffers_of_an_arena_are_apart() {
        let mut arena = Arena::default();
        let lens = [3, 0, 100_000, ARENA_REGION / 16, 17, ARENA_REGION / 16, 5_000_000];
        let lens: Vec<usize> = (0..4).flat_map(|_| lens).collect();
        let mut buffers: Vec<Words> = lens.iter().map(|&len| arena.zeroed(len).unwrap()).collect();
        drop(arena);
        for (i, words) in buffers.iter_mut().enumerate() {
            assert_eq!((words.len(), words.as_slice().as_ptr() as usize % 64), (lens[i], 0));
            assert!(words.as_slice().iter().all(|&w| w == 0), "buffer {i}");
            words.as_mut_slice().fill(i as u32 + 1);
        }
        for (i, words) in buffers.iter().enumerate() {
            assert!(words.as_slice().iter().all(|&w| w == i as u32 + 1), "buffer {i}");
        }
        // Small buffers share a region; one that does not fit has its own.
        let shared = |a: usize, b: usize| Arc::ptr_eq(&buffers[a].region, &buffers[b].region);
        assert!(shared(0, 2) && !shared(0, 6));
        assert_eq!(Arena::default().zeroed(usize::MAX).err(), Words::zeroed(usize::MAX).err());
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert_eq!(Words::zeroed(usize::MAX).err(), Some(AllocError { bytes: usize::MAX }));
        assert!(Words::zeroed(usize::MAX / 8).is_err());
    }
}
