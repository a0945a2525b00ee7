//! Zeroed, aligned word buffers straight from the system, on huge pages where they pay.

use memmap2::MmapMut;

/// Huge page size, and the alignment of buffers of at least one huge page.
const HUGE_PAGE: usize = 2 << 20;

/// The system refused memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot allocate {bytes} bytes")]
pub struct AllocError {
    /// Bytes asked for; `usize::MAX` where the size does not fit in an address.
    pub bytes: usize,
}

/// A zeroed buffer of `u32` words: page-aligned, or 2 MiB-aligned and advised to use huge pages
/// from 2 MiB on. Untouched pages take no memory.
pub struct Words {
    map: MmapMut,
    /// Byte offset of the first word, which aligns it.
    offset: usize,
    len: usize,
    huge_pages: bool,
}

impl Words {
    /// A buffer of `len` zero words.
    pub fn zeroed(len: usize) -> Result<Self, AllocError> {
        let bytes = len.checked_mul(4).ok_or(AllocError { bytes: usize::MAX })?;
        let huge = bytes >= HUGE_PAGE;
        let padded = bytes.checked_add(if huge { HUGE_PAGE } else { 1 });
        let map = padded
            .filter(|&size| isize::try_from(size).is_ok())
            .and_then(|size| MmapMut::map_anon(size).ok())
            .ok_or(AllocError { bytes })?;
        let offset = if huge { map.as_ptr().align_offset(HUGE_PAGE) } else { 0 };
        assert!(offset <= map.len() - bytes, "alignment offset {offset} exceeds the padding");
        let huge_pages = huge && advise_huge(&map);
        Ok(Self { map, offset, len, huge_pages })
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
        self.huge_pages
    }

    /// The words.
    pub fn as_slice(&self) -> &[u32] {
        bytemuck::cast_slice(&self.map[self.offset..self.offset + 4 * self.len])
    }

    /// The words.
    pub fn as_mut_slice(&mut self) -> &mut [u32] {
        bytemuck::cast_slice_mut(&mut self.map[self.offset..self.offset + 4 * self.len])
    }
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
    fn impossible_sizes_are_errors() {
        assert_eq!(Words::zeroed(usize::MAX).err(), Some(AllocError { bytes: usize::MAX }));
        assert!(Words::zeroed(usize::MAX / 8).is_err());
    }
}
