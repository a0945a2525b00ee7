//! Memory-mapped model files: the crate's unsafe calls.

use std::{fs::File, ops::Range, path::Path};

use memmap2::Mmap;
#[cfg(target_os = "linux")]
use memmap2::UncheckedAdvice;

use crate::error::LoadError;

/// Maps a regular file read-only.
///
/// The file must not be changed or truncated while it is mapped: the bytes would change under the
/// reader, and touching a page past the new end kills the process.
pub(crate) fn map_file(path: &Path) -> Result<Mmap, LoadError> {
    let metadata = path.metadata().map_err(|e| LoadError::io(path, e))?;
    if !metadata.is_file() {
        return Err(LoadError::malformed(path, "is not a regular file"));
    }
    let file = File::open(path).map_err(|e| LoadError::io(path, e))?;
    // SAFETY: the mapping is read-only, and sound as long as nobody changes or truncates the file
    // while it lives: headers are borrowed from it as checked UTF-8, weights as plain bytes.
    // Keeping the file still is the documented duty of whoever runs the program, as it is for every
    // loader that maps its weights.
    unsafe { Mmap::map(&file) }.map_err(|e| LoadError::io(path, e))
}

/// Takes the pages that lie within `rows` of a tensor out of this process's memory; they come back
/// from the file when they are touched. `shape` is the tensor's, `data` its bytes in the mapped
/// file. Does nothing where the system cannot.
pub(crate) fn release(map: &Mmap, shape: &[usize], data: &Range<usize>, rows: Range<usize>) {
    #[cfg(target_os = "linux")]
    {
        let row = data.len() / shape.first().copied().unwrap_or(1).max(1);
        let bytes = data.start + rows.start * row..data.end.min(data.start + rows.end * row);
        // Of the smallest pages, those at either end that others share stay. Larger ones may go;
        // they come back like all others.
        let start = bytes.start.next_multiple_of(PAGE);
        let len = (bytes.end / PAGE * PAGE).saturating_sub(start);
        if len > 0 && bytes.end <= map.len() {
            // SAFETY: the mapping is of a file and nobody writes to it, so a page that is dropped
            // comes back from the file with the bytes it had. A refusal leaves it as it was.
            let _ = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (map, shape, data, rows);
}

/// The smallest page there is.
#[cfg(target_os = "linux")]
const PAGE: usize = 4096;

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Resident kilobytes of this process that are backed by files.
    fn resident() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("RssFile:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn released_pages_leave_memory_and_come_back() {
        const LEN: usize = 64 << 20;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        let contents: Vec<u8> = (0..LEN).map(|i| (i / 1000) as u8).collect();
        std::fs::write(&path, &contents).unwrap();
        let map = map_file(&path).unwrap();
        assert!(map[..] == contents[..]);
        let before = resident();
        let rows = LEN / 1000;
        release(&map, &[rows, 1000], &(5..5 + rows * 1000), 0..rows);
        let gone = before.saturating_sub(resident());
        // Other tests map small files at the same time.
        assert!(gone > (LEN >> 10) * 3 / 4, "{gone} KiB of {LEN} bytes are gone");
        // Nothing of it is whole pages, or in the file.
        release(&map, &[4, 1], &(7..11), 1..3);
        release(&map, &[2, LEN], &(0..2 * LEN), 0..2);
        assert!(map[..] == contents[..]);
    }
}
