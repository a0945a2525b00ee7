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
//! Every byte knows whether it was ever written, and who of the running launch wrote it.

use crate::SimError;
use crate::error::{Access, FaultKind, Space};

const REGION_BITS: u32 = 40;
const MIDDLE: u64 = 1 << (REGION_BITS - 1);

/// Device memory.
#[derive(Debug, Default)]
pub struct Memory {
    allocations: Vec<Allocation>,
}

#[derive(Debug)]
struct Allocation {
    name: String,
    base: u64,
    data: Vec<u8>,
    /// Per byte: written at least once. `None`: all are.
    written: Option<Vec<bool>>,
    /// Per byte: the [`Toucher::tag`] of who wrote it in the running launch, or 0.
    writers: Option<Vec<u64>>,
    freed: bool,
}

impl Allocation {
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

    /// Allocates `bytes` that are an error to use before something has written them.
    pub fn alloc_uninit(&mut self, name: &str, bytes: usize) -> u64 {
        self.push(name, vec![0xa5; bytes], Some(vec![false; bytes]))
    }

    fn push(&mut self, name: &str, data: Vec<u8>, written: Option<Vec<bool>>) -> u64 {
        let base = (self.allocations.len() as u64 + 1) << REGION_BITS | MIDDLE;
        let name = name.into();
        self.allocations.push(Allocation {
            name,
            base,
            data,
            written,
            writers: None,
            freed: false,
        });
        base
    }

    /// Gives an allocation back; `address` is its start.
    pub fn free(&mut self, address: u64) -> Result<(), SimError> {
        let found = self.find(address).map(|i| &mut self.allocations[i]);
        match found.filter(|found| found.base == address && !found.freed) {
            Some(found) => {
                found.freed = true;
                found.data = Vec::new();
                Ok(())
            }
            None => Err(SimError::Host(format!("free of {address:#x}, no allocation's start"))),
        }
    }

    /// Copies from the host.
    pub fn write(&mut self, address: u64, data: &[u8]) -> Result<(), SimError> {
        let span = self.host_span(Access::Write, address, data.len())?;
        self.store(span, data, None).map_err(|kind| SimError::Host(kind.to_string()))
    }

    /// `bytes` bytes, all of which something has written.
    pub fn read(&self, address: u64, bytes: usize) -> Result<&[u8], SimError> {
        let span = self.host_span(Access::Read, address, bytes)?;
        let allocation = &self.allocations[span.allocation];
        let unwritten = allocation.written.as_ref().and_then(|written| {
            written[span.offset..][..bytes].iter().position(|written| !written)
        });
        match unwritten {
            Some(at) => {
                let place = allocation.describe(address + at as u64, 1);
                Err(SimError::Host(format!("nothing was written to {place}")))
            }
            None => Ok(&allocation.data[span.offset..][..bytes]),
        }
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
        written.is_none_or(|written| written[span.offset..][..span.bytes].iter().all(|&w| w))
    }

    /// Writes; `by` is who, where a kernel does it.
    pub(crate) fn store(
        &mut self,
        span: Span,
        data: &[u8],
        by: Option<Toucher>,
    ) -> Result<(), FaultKind> {
        if let Some(by) = by {
            self.check_writers(Access::Write, span, by, Some(data))?;
        }
        let allocation = &mut self.allocations[span.allocation];
        let range = span.offset..span.offset + span.bytes;
        allocation.data[range.clone()].copy_from_slice(data);
        if let Some(written) = &mut allocation.written {
            written[range.clone()].fill(true);
        }
        if let Some(by) = by {
            let len = allocation.data.len();
            let writers = allocation.writers.get_or_insert_with(|| vec![0; len]);
            writers[range].fill(by.tag());
        }
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
        let Some(writers) = &allocation.writers else { return Ok(()) };
        let range = span.offset..span.offset + span.bytes;
        let tag = by.tag();
        let races = |writer: u64| {
            let same_block = writer >> 32 == tag >> 32;
            writer != 0 && writer != tag && (!same_block || writer >> 6 == tag >> 6)
        };
        let writers = &writers[range.clone()];
        let Some(at) = writers.iter().position(|&writer| races(writer)) else { return Ok(()) };
        let writer = writers[at];
        let address = allocation.base + (span.offset + at) as u64;
        let place = allocation.describe(address, 1);
        if writer >> 32 != tag >> 32 {
            let by = (writer >> 32) as u32 - 1;
            return Err(FaultKind::CtaRace { access, address, place, by });
        }
        if data == Some(&allocation.data[range]) {
            return Ok(());
        }
        let by = (writer & 63) as usize;
        Err(FaultKind::GlobalRace { access, address, place, by })
    }

    /// A new launch: what earlier ones wrote is no race.
    pub(crate) fn begin_launch(&mut self) {
        for allocation in &mut self.allocations {
            allocation.writers = None;
        }
    }
}
