//! Shared memory of one block: bytes, whether they are defined, and who touched them since the
//! last barrier.

use crate::error::{Access, FaultKind, Space};

/// Address of the first byte; hardware keeps the first KiB to itself.
pub(crate) const SHARED_BASE: u64 = 0x400;

/// State of a byte.
const DEFINED: u8 = 0;
const UNDEFINED: u8 = 1;
const IN_FLIGHT: u8 = 2;

/// Tags of who touched a byte: 64 to a barrier interval, one for each warp and one for several.
const TAGS: u32 = 64;
const SEVERAL: u32 = TAGS - 1;

#[derive(Debug)]
pub(crate) struct Shared {
    data: Vec<u8>,
    state: Vec<u8>,
    /// Per byte, the tag of the last warp that wrote it.
    written: Vec<u32>,
    /// Per byte, the tag of the last warp that read it, or of several ones.
    read: Vec<u32>,
    /// Tag of warp 0 in this interval. Grows over blocks, so that tags are
    /// cleared only when it is at its end.
    interval: u32,
}

impl Shared {
    pub fn new(bytes: usize) -> Self {
        Shared {
            data: vec![0; bytes],
            state: vec![UNDEFINED; bytes],
            written: vec![0; bytes],
            read: vec![0; bytes],
            interval: TAGS,
        }
    }

    /// A new block: nothing is defined.
    pub fn reset(&mut self) {
        self.state.fill(UNDEFINED);
        self.barrier();
    }

    /// Number of this interval between barriers.
    pub fn interval(&self) -> u64 {
        u64::from(self.interval / TAGS)
    }

    /// All warps have met: what was done before is visible.
    pub fn barrier(&mut self) {
        if self.interval > u32::MAX - 2 * TAGS {
            self.written.fill(0);
            self.read.fill(0);
            self.interval = 0;
        }
        self.interval += TAGS;
    }

    /// Index of the first byte of an access inside the bounds, at a multiple of its size.
    pub fn check(&self, access: Access, address: u64, bytes: usize) -> Result<usize, FaultKind> {
        let space = Space::Shared;
        let offset = address.checked_sub(SHARED_BASE).filter(|offset| {
            offset.checked_add(bytes as u64).is_some_and(|end| end <= self.data.len() as u64)
        });
        let size = self.data.len();
        let Some(offset) = offset else {
            let offset = i128::from(address) - i128::from(SHARED_BASE);
            let place = format!("byte {offset} of the {size} bytes that the launch gives");
            return Err(FaultKind::OutOfBounds { space, access, bytes, address, place });
        };
        if !address.is_multiple_of(bytes as u64) {
            let place = format!("byte {offset} of {size}");
            return Err(FaultKind::Misaligned { space, access, bytes, address, place });
        }
        Ok(offset as usize)
    }

    /// Whether all of the bytes are defined.
    pub fn is_defined(&self, offset: usize, bytes: usize) -> bool {
        self.state[offset..offset + bytes].iter().fold(0, |or, &state| or | state) == DEFINED
    }

    /// The bytes, for a warp.
    pub fn load(&mut self, offset: usize, bytes: usize, warp: usize) -> Result<&[u8], FaultKind> {
        // Loops over a known number of bytes are a few vector instructions.
        match bytes {
            1 => self.load_sized::<1>(offset, warp),
            2 => self.load_sized::<2>(offset, warp),
            4 => self.load_sized::<4>(offset, warp),
            8 => self.load_sized::<8>(offset, warp),
            16 => self.load_sized::<16>(offset, warp),
            _ => unreachable!("a lane loads {bytes} bytes"),
        }
    }

    fn load_sized<const BYTES: usize>(
        &mut self,
        offset: usize,
        warp: usize,
    ) -> Result<&[u8], FaultKind> {
        let (bytes, range) = (BYTES, offset..offset + BYTES);
        self.check_in_flight(Access::Read, offset, bytes)?;
        let tag = self.interval + warp as u32;
        let interval = self.interval;
        if let Some(at) = foreign(&self.written[range.clone()], interval, tag) {
            return Err(self.race(
                Access::Read,
                offset + at,
                Access::Write,
                self.written[offset + at],
            ));
        }
        for read in &mut self.read[range.clone()] {
            *read = if *read >= interval && *read != tag { interval + SEVERAL } else { tag };
        }
        Ok(&self.data[range])
    }

    /// Writes; bytes of an undefined value are undefined after. Several warps may write the same
    /// values, as Triton does where a layout repeats them.
    pub fn store(
        &mut self,
        offset: usize,
        data: &[u8],
        defined: bool,
        warp: usize,
    ) -> Result<(), FaultKind> {
        self.check_in_flight(Access::Write, offset, data.len())?;
        let range = offset..offset + data.len();
        let own = self.interval + warp as u32;
        let repeated = foreign(&self.written[range.clone()], self.interval, own).is_some()
            && foreign(&self.read[range.clone()], self.interval, own).is_none()
            && self.is_defined(offset, data.len()) == defined
            && self.data[range.clone()] == *data;
        if repeated {
            self.written[range].fill(self.interval + SEVERAL);
            return Ok(());
        }
        self.land(offset, data, defined, warp)
    }

    /// An asynchronous copy to these bytes begins.
    pub fn begin_copy(
        &mut self,
        offset: usize,
        bytes: usize,
        warp: usize,
    ) -> Result<(), FaultKind> {
        self.check_in_flight(Access::Write, offset, bytes)?;
        self.check_race(offset, bytes, warp)?;
        self.state[offset..offset + bytes].fill(IN_FLIGHT);
        Ok(())
    }

    /// An asynchronous copy ends: its bytes are there as if written now.
    pub fn land(
        &mut self,
        offset: usize,
        data: &[u8],
        defined: bool,
        warp: usize,
    ) -> Result<(), FaultKind> {
        self.check_race(offset, data.len(), warp)?;
        let range = offset..offset + data.len();
        self.written[range.clone()].fill(self.interval + warp as u32);
        self.state[range.clone()].fill(if defined { DEFINED } else { UNDEFINED });
        self.data[range].copy_from_slice(data);
        Ok(())
    }

    /// No other warp has touched the bytes that are about to be written, in this interval.
    fn check_race(&self, offset: usize, bytes: usize, warp: usize) -> Result<(), FaultKind> {
        let range = offset..offset + bytes;
        let tag = self.interval + warp as u32;
        for (tags, other) in [(&self.written, Access::Write), (&self.read, Access::Read)] {
            if let Some(at) = foreign(&tags[range.clone()], self.interval, tag) {
                return Err(self.race(Access::Write, offset + at, other, tags[offset + at]));
            }
        }
        Ok(())
    }

    /// No copy to one of the bytes is under way.
    #[inline]
    fn check_in_flight(
        &self,
        access: Access,
        offset: usize,
        bytes: usize,
    ) -> Result<(), FaultKind> {
        let state = &self.state[offset..offset + bytes];
        if !state.iter().fold(false, |any, &state| any | (state == IN_FLIGHT)) {
            return Ok(());
        }
        let at = state.iter().position(|&state| state == IN_FLIGHT).unwrap_or(0);
        Err(FaultKind::InFlight { access, address: SHARED_BASE + (offset + at) as u64 })
    }

    fn race(&self, access: Access, offset: usize, other: Access, tag: u32) -> FaultKind {
        let by = match tag - self.interval {
            SEVERAL => "several warps".into(),
            warp => format!("warp {warp}"),
        };
        FaultKind::SharedRace { access, address: SHARED_BASE + offset as u64, other, by }
    }
}

/// The first byte that another warp touched in this interval.
#[inline]
fn foreign(tags: &[u32], interval: u32, own: u32) -> Option<usize> {
    let is_foreign = |&tag: &u32| tag >= interval && tag != own;
    // Almost always there is none, which a loop without exits over a known number finds faster.
    let any = |tags: &[u32]| tags.iter().fold(false, |any, tag| any | is_foreign(tag));
    let found = match tags.len() {
        4 => any(&tags[..4]),
        8 => any(&tags[..8]),
        16 => any(&tags[..16]),
        _ => any(tags),
    };
    if found { tags.iter().position(is_foreign) } else { None }
}
