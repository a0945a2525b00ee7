//! What is known about each byte of an allocation, kept in proportion to what is touched.

use std::ops::Range;

/// One bit a byte.
#[derive(Debug)]
pub(super) struct Marks {
    words: Vec<u64>,
}

/// The words that hold a range of bits, and the bits of each.
fn words(range: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    let first = range.start / 64;
    let last = if range.is_empty() { first } else { range.end.div_ceil(64) };
    (first..last).map(move |word| {
        let low = range.start.saturating_sub(64 * word);
        let high = (64 * (word + 1)).saturating_sub(range.end);
        (word, u64::MAX << low & u64::MAX >> high)
    })
}

impl Marks {
    /// `bytes` bytes without a mark.
    pub fn new(bytes: usize) -> Self {
        Marks { words: vec![0; bytes.div_ceil(64)] }
    }

    /// Whether every byte is marked.
    pub fn all(&self, range: Range<usize>) -> bool {
        words(range).all(|(word, bits)| self.words[word] & bits == bits)
    }

    /// The first byte without a mark.
    pub fn first_unmarked(&self, range: Range<usize>) -> Option<usize> {
        let mut gaps = words(range).map(|(word, bits)| (word, bits & !self.words[word]));
        let (word, gap) = gaps.find(|(_, gap)| *gap != 0)?;
        Some(64 * word + gap.trailing_zeros() as usize)
    }

    pub fn mark(&mut self, range: Range<usize>) {
        for (word, bits) in words(range) {
            self.words[word] |= bits;
        }
    }

    /// The marks of `range`, counted from its start.
    pub fn slice(&self, range: Range<usize>) -> Marks {
        let (first, shift) = (range.start / 64, range.start % 64);
        let word = |i: usize| self.words.get(first + i).copied().unwrap_or(0);
        let shifted = |i: usize| match shift {
            0 => word(i),
            _ => word(i) >> shift | word(i + 1) << (64 - shift),
        };
        Marks { words: (0..range.len().div_ceil(64)).map(shifted).collect() }
    }

    /// Takes over the marks that [`slice`](Self::slice) made of a range as long.
    pub fn splice(&mut self, range: Range<usize>, marks: &Marks) {
        let source = |bit: usize| -> u64 {
            let (word, shift) = (bit / 64, bit % 64);
            let high = marks.words.get(word + 1).filter(|_| shift > 0);
            marks.words[word] >> shift | high.map_or(0, |high| high << (64 - shift))
        };
        let start = range.start;
        for (word, bits) in words(range) {
            let low = bits.trailing_zeros() as usize;
            let taken = source(64 * word + low - start) << low;
            self.words[word] = self.words[word] & !bits | taken & bits;
        }
    }

    pub fn is_marked(&self, byte: usize) -> bool {
        self.words[byte / 64] >> (byte % 64) & 1 != 0
    }
}

/// Bytes of a page of [`Tags`].
const PAGE: usize = 1024;

/// A number for each byte that the running launch has written; 0 for the others.
#[derive(Debug, Default)]
pub(super) struct Tags {
    pages: Vec<Option<Box<Page>>>,
}

#[derive(Debug)]
struct Page {
    /// The launch that `tags` are of.
    launch: u64,
    tags: [u64; PAGE],
}

impl Tags {
    /// The tags of `bytes` bytes from `offset`, which lie in one page; `None` where all are 0.
    pub fn get(&self, launch: u64, offset: usize, bytes: usize) -> Option<&[u64]> {
        let page = self.pages.get(offset / PAGE)?.as_ref()?;
        (page.launch == launch).then(|| &page.tags[offset % PAGE..][..bytes])
    }

    /// Sets the tags of `bytes` bytes from `offset`, which lie in one page of `len` bytes in all.
    pub fn set(&mut self, launch: u64, offset: usize, bytes: usize, tag: u64, len: usize) {
        if self.pages.is_empty() {
            self.pages.resize_with(len.div_ceil(PAGE), || None);
        }
        let page = self.pages[offset / PAGE]
            .get_or_insert_with(|| Box::new(Page { launch, tags: [0; PAGE] }));
        if page.launch != launch {
            page.launch = launch;
            page.tags.fill(0);
        }
        page.tags[offset % PAGE..][..bytes].fill(tag);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_follow_their_ranges() {
        for range in [0..1, 3..64, 64..128, 60..70, 0..200, 5..5, 63..129] {
            let mut marks = Marks::new(200);
            marks.mark(range.clone());
            for byte in 0..200 {
                assert_eq!(marks.is_marked(byte), range.contains(&byte), "{byte} of {range:?}");
            }
            assert!(marks.all(range.clone()));
            let outside = (0..200).find(|byte| !range.contains(byte));
            assert_eq!(marks.first_unmarked(0..200), outside);
        }
    }

    #[test]
    fn marks_move_with_what_they_are_of() {
        let mut source = Marks::new(300);
        for start in (0..300).step_by(7) {
            source.mark(start..start + start % 5);
        }
        for (from, to, len) in [(0, 0, 300), (1, 0, 64), (65, 3, 130), (63, 129, 1), (10, 70, 0)] {
            let mut target = Marks::new(300);
            target.mark(0..300);
            target.splice(to..to + len, &source.slice(from..from + len));
            for byte in 0..300 {
                let moved = (to..to + len).contains(&byte).then(|| byte + from - to);
                let wanted = moved.is_none_or(|moved| source.is_marked(moved));
                assert_eq!(target.is_marked(byte), wanted, "{byte} of {from} → {to}, {len}");
            }
        }
    }

    #[test]
    fn tags_are_of_one_launch() {
        let mut tags = Tags::default();
        tags.set(1, 2000, 4, 7, 5000);
        assert_eq!(tags.get(1, 1998, 4), Some(&[0, 0, 7, 7][..]));
        assert_eq!(tags.get(2, 2000, 4), None);
        assert_eq!(tags.get(1, 4000, 4), None);
        tags.set(2, 2004, 4, 9, 5000);
        assert_eq!(tags.get(2, 2000, 8), Some(&[0, 0, 0, 0, 9, 9, 9, 9][..]));
    }
}
