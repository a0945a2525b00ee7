//! Global memory: allocations in a 64-bit address space.
//!
//! Each allocation stands in the middle of its own 2^40 bytes, so that the upper bits of an
//! address say which allocation it was derived from: an index that is off by less than 2^39 never
//! lands in a neighbour, and the message names the allocation that was meant.
//!
//! ```text
//! address = (n + 1) << 40 | 1 << 39 + offset          n: number of the allocation
//! ```
//!
//! Every byte knows whether it was ever written, and who of the running launch wrote it. The place
//! of an allocation that was given back stays empty for a while, so that a stale address is found.

mod marks;

use std::collections::VecDeque;
use std::ops::Range;

use crate::SimError;
use crate::error::{Access, FaultKind, Space};
use marks::{Marks, Tags};

const REGION_BITS: u32 = 40;
const MIDDLE: u64 = 1 << (REGION_BITS - 1);

/// Freed allocations whose places are not reused yet.
const QUARANTINE: usize = 1024;

/// What the host gets for bytes that nothing has written: NaN in every float format.
const UNDEFINED: u8 = 0xff;

/// Device memory.
#[derive(Debug, Default)]
pub struct Memory {
    allocations: Vec<Allocation>,
    /// The freed ones, oldest first.
    freed: VecDeque<usize>,
    /// Number of the running launch.
    launch: u64,
}

#[derive(Debug)]
struct Allocation {
    name: String,
    base: u64,
    data: Vec<u8>,
    /// The bytes that were written at least once. `None`: all are.
    written: Option<Marks>,
    /// Nothing was written yet: all bytes are 0, and take no memory.
    fresh: bool,
    /// The [`Toucher::tag`] of who wrote a byte in the running launch.
    writers: Tags,
    freed: bool,
}

impl Allocation {
    fn put(&mut self, span: Span, data: &[u8]) {
        self.data[span.range()].copy_from_slice(data);
        self.mark(span);
    }

    /// The bytes are written.
    fn mark(&mut self, span: Span) {
        self.fresh = false;
        if span.bytes == self.data.len() {
            self.written = None;
        } else if let Some(written) = &mut self.written {
            written.mark(span.range());
        }
    }

    /// Which of the bytes are written.
    fn remark(&mut self, span: Span, marks: &Marks) {
        self.fresh = false;
        let len = self.data.len();
        let written = self.written.get_or_insert_with(|| {
            let mut all = Marks::new(len);
            all.mark(0..len);
            all
        });
        written.splice(span.range(), marks);
    }

    /// Index of a byte, which need not be inside.
    fn offset(&self, address: u64) -> i128 {
        i128::from(address) - i128::from(self.base)
    }

    /// Where an address is, in words.
    fn describe(&self, address: u64, bytes: usize) -> String {
        let (offset, len) = (self.offset(address), self.data.len());
        let end = offset + bytes as i128 - len as i128;
        let name = &self.name;
        if self.freed {
            format!("`{name}` is freed")
        } else if offset < 0 {
            format!("{} bytes before the start of `{name}` ({len} bytes)", -offset)
        } else if end > 0 {
            format!("ends {end} bytes past the end of `{name}` ({len} bytes)")
        } else {
            format!("byte {offset} of `{name}` ({len} bytes)")
        }
    }
}

/// A warp between two barriers of its block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Toucher {
    /// Number of the block in the grid.
    pub block: u32,
    /// Barriers that the block has passed.
    pub interval: u64,
    pub warp: usize,
}

impl Toucher {
    /// `1 + block | interval | warp`, of 32, 26 and 6 bits.
    fn tag(self) -> u64 {
        (u64::from(self.block) + 1) << 32 | (self.interval & 0x3ff_ffff) << 6 | self.warp as u64
    }
}

/// Bytes inside one allocation, found and checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    allocation: usize,
    offset: usize,
    bytes: usize,
}

impl Span {
    fn range(self) -> Range<usize> {
        self.offset..self.offset + self.bytes
    }

    /// Element `index` of `bytes` bytes.
    pub fn element(self, index: usize, bytes: usize) -> Span {
        let offset = index * bytes;
        debug_assert!(offset + bytes <= self.bytes);
        Span { offset: self.offset + offset, bytes, ..self }
    }
}

impl Memory {
    /// No allocations.
    pub fn new() -> Self {
        Self::default()
    }

    /// Allocates and fills; returns the address, a multiple of 256.
    pub fn alloc(&mut self, name: &str, data: &[u8]) -> u64 {
        self.push(name, data.to_vec(), None)
    }

    /// Allocates `bytes` that are an error to use before something has written them. Costs host
    /// memory as they are touched.
    pub fn alloc_uninit(&mut self, name: &str, bytes: usize) -> u64 {
        self.push(name, vec![0; bytes], Some(Marks::new(bytes)))
    }

    fn push(&mut self, name: &str, data: Vec<u8>, written: Option<Marks>) -> u64 {
        let reusable = self.freed.len() > QUARANTINE;
        let reused = if reusable { self.freed.pop_front() } else { None };
        let place = reused.unwrap_or(self.allocations.len());
        let base = (place as u64 + 1) << REGION_BITS | MIDDLE;
        let name = name.into();
        let new = Allocation {
            name,
            base,
            data,
            fresh: written.is_some(),
            written,
            writers: Tags::default(),
            freed: false,
        };
        match reused {
            Some(place) => self.allocations[place] = new,
            None => self.allocations.push(new),
        }
        base
    }

    /// Gives an allocation back; `address` is its start.
    pub fn free(&mut self, address: u64) -> Result<(), SimError> {
        let place = self.find(address).filter(|&place| {
            let found = &self.allocations[place];
            found.base == address && !found.freed
        });
        let place = place.ok_or_else(|| {
            SimError::Host(format!("free of {address:#x}, no allocation's start"))
        })?;
        let found = &mut self.allocations[place];
        found.freed = true;
        (found.data, found.written, found.writers) = (Vec::new(), None, Tags::default());
        self.freed.push_back(place);
        Ok(())
    }

    /// Copies from the host.
    pub fn write(&mut self, address: u64, data: &[u8]) -> Result<(), SimError> {
        let span = self.host_span(Access::Write, address, data.len())?;
        self.allocations[span.allocation].put(span, data);
        Ok(())
    }

    /// `bytes` bytes, all of which something has written.
    pub fn read(&self, address: u64, bytes: usize) -> Result<&[u8], SimError> {
        let span = self.host_span(Access::Read, address, bytes)?;
        let allocation = &self.allocations[span.allocation];
        let marks = allocation.written.as_ref();
        match marks.and_then(|marks| marks.first_unmarked(span.range())) {
            Some(at) => {
                let place = allocation.describe(allocation.base + at as u64, 1);
                Err(SimError::Host(format!("nothing was written to {place}")))
            }
            None => Ok(&allocation.data[span.range()]),
        }
    }

    /// Copies to the host; bytes that nothing has written come out as `0xff`.
    pub fn read_lossy(&self, address: u64, into: &mut [u8]) -> Result<(), SimError> {
        let span = self.host_span(Access::Read, address, into.len())?;
        let allocation = &self.allocations[span.allocation];
        into.copy_from_slice(&allocation.data[span.range()]);
        if let Some(marks) = allocation.written.as_ref().filter(|m| !m.all(span.range())) {
            let unmarked = (0..into.len()).filter(|i| !marks.is_marked(span.offset + i));
            unmarked.for_each(|i| into[i] = UNDEFINED);
        }
        Ok(())
    }

    /// Copies within the memory. What is undefined stays so.
    pub fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<(), SimError> {
        let target = self.host_span(Access::Write, to, bytes)?;
        let source = self.host_span(Access::Read, from, bytes)?;
        let allocation = &self.allocations[source.allocation];
        let data = allocation.data[source.range()].to_vec();
        let marks = allocation.written.as_ref().map(|marks| marks.slice(source.range()));
        let allocation = &mut self.allocations[target.allocation];
        allocation.put(target, &data);
        if let Some(marks) = marks.filter(|marks| !marks.all(0..bytes)) {
            allocation.remark(target, &marks);
        }
        Ok(())
    }

    /// Repeats `pattern` over `bytes` bytes, a multiple of its length.
    pub fn fill(&mut self, address: u64, pattern: &[u8], bytes: usize) -> Result<(), SimError> {
        let span = self.host_span(Access::Write, address, bytes)?;
        let allocation = &mut self.allocations[span.allocation];
        match pattern {
            [0] if allocation.fresh => {}
            [byte] => allocation.data[span.range()].fill(*byte),
            _ => {
                let elements = allocation.data[span.range()].chunks_exact_mut(pattern.len());
                elements.for_each(|element| element.copy_from_slice(pattern));
            }
        }
        allocation.mark(span);
        Ok(())
    }

    /// Whether something has written each of `bytes` bytes.
    pub fn is_written(&self, address: u64, bytes: usize) -> Result<bool, SimError> {
        let span = self.host_span(Access::Read, address, bytes)?;
        Ok(self.is_defined(span))
    }

    fn host_span(&self, access: Access, address: u64, bytes: usize) -> Result<Span, SimError> {
        self.span(access, address, bytes).map_err(|kind| SimError::Host(kind.to_string()))
    }

    fn find(&self, address: u64) -> Option<usize> {
        let index = usize::try_from((address >> REGION_BITS).checked_sub(1)?).ok()?;
        (index < self.allocations.len()).then_some(index)
    }

    /// Bounds of an access, without regard to alignment.
    fn span(&self, access: Access, address: u64, bytes: usize) -> Result<Span, FaultKind> {
        let inside = |&i: &usize| {
            let allocation = &self.allocations[i];
            let offset = allocation.offset(address);
            let end = offset + bytes as i128;
            offset >= 0 && end <= allocation.data.len() as i128 && !allocation.freed
        };
        match self.find(address).filter(inside) {
            Some(allocation) => {
                let offset = (address - self.allocations[allocation].base) as usize;
                Ok(Span { allocation, offset, bytes })
            }
            None => {
                let place = self.describe(address, bytes);
                Err(FaultKind::OutOfBounds { space: Space::Global, access, bytes, address, place })
            }
        }
    }

    fn describe(&self, address: u64, bytes: usize) -> String {
        match self.find(address) {
            Some(i) => self.allocations[i].describe(address, bytes),
            None => "no allocation is near".into(),
        }
    }

    /// Bounds of a lane's access, and alignment to `align`.
    pub(crate) fn check(
        &self,
        access: Access,
        address: u64,
        bytes: usize,
        align: usize,
    ) -> Result<Span, FaultKind> {
        let span = self.span(access, address, bytes)?;
        if !address.is_multiple_of(align as u64) {
            let (space, place) = (Space::Global, self.describe(address, bytes));
            return Err(FaultKind::Misaligned { space, access, bytes, address, place });
        }
        Ok(span)
    }

    /// The bytes, for a lane of a kernel.
    pub(crate) fn load(&self, span: Span, by: Toucher) -> Result<&[u8], FaultKind> {
        self.check_writers(Access::Read, span, by, None)?;
        Ok(&self.allocations[span.allocation].data[span.offset..][..span.bytes])
    }

    /// Whether all of the bytes were written.
    pub(crate) fn is_defined(&self, span: Span) -> bool {
        let written = self.allocations[span.allocation].written.as_ref();
        written.is_none_or(|written| written.all(span.range()))
    }

    /// Writes, for a lane of a kernel.
    pub(crate) fn store(&mut self, span: Span, data: &[u8], by: Toucher) -> Result<(), FaultKind> {
        self.check_writers(Access::Write, span, by, Some(data))?;
        let launch = self.launch;
        let allocation = &mut self.allocations[span.allocation];
        allocation.put(span, data);
        let len = allocation.data.len();
        allocation.writers.set(launch, span.offset, span.bytes, by.tag(), len);
        Ok(())
    }

    /// No other block of the launch has written these bytes, and no other warp since the last
    /// barrier unless it wrote the same `data`.
    fn check_writers(
        &self,
        access: Access,
        span: Span,
        by: Toucher,
        data: Option<&[u8]>,
    ) -> Result<(), FaultKind> {
        let allocation = &self.allocations[span.allocation];
        let writers = allocation.writers.get(self.launch, span.offset, span.bytes);
        let Some(writers) = writers else { return Ok(()) };
        let tag = by.tag();
        let races = |writer: u64| {
            let same_block = writer >> 32 == tag >> 32;
            writer != 0 && writer != tag && (!same_block || writer >> 6 == tag >> 6)
        };
        let Some(at) = writers.iter().position(|&writer| races(writer)) else { return Ok(()) };
        let writer = writers[at];
        let address = allocation.base + (span.offset + at) as u64;
        let place = allocation.describe(address, 1);
        if writer >> 32 != tag >> 32 {
            let by = (writer >> 32) as u32 - 1;
            return Err(FaultKind::CtaRace { access, address, place, by });
        }
        if data == Some(&allocation.data[span.range()]) {
            return Ok(());
        }
        let by = (writer & 63) as usize;
        Err(FaultKind::GlobalRace { access, address, place, by })
    }

    /// A new launch: what earlier ones wrote is no race.
    pub(crate) fn begin_launch(&mut self) {
        self.launch += 1;
    }
}
