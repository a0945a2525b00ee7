//! What a launch did, counted.

use std::collections::{BTreeMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// Counts of one launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    /// Warp instructions executed, by opcode with modifiers. An instruction whose guard is false
    /// in all lanes counts: it is issued.
    pub instructions: BTreeMap<String, u64>,
    /// Floating-point operations of active lanes: a fused multiply-add is two, `mma` 4096.
    pub flops: u64,
    /// Global memory.
    pub global: Traffic,
    /// Shared memory.
    pub shared: Traffic,
    /// Blocks run.
    pub blocks: u64,
}

/// Bytes moved to and from one memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes that lanes asked to read.
    pub read_bytes: u64,
    /// Bytes that lanes asked to write.
    pub written_bytes: u64,
    /// 32-byte sectors that loads touch, counted for each warp instruction. 0 of shared memory.
    pub read_sectors: u64,
    /// 32-byte sectors that stores touch, counted for each warp instruction. 0 of shared memory.
    pub written_sectors: u64,
    /// 32-byte sectors that loads touch, counted once a block: what a block's cache must fetch. 0 of
    /// shared memory.
    pub read_footprint: u64,
    /// 32-byte sectors that stores touch, counted once a block. 0 of shared memory.
    pub written_footprint: u64,
}

impl Profile {
    /// All warp instructions.
    pub fn warp_instructions(&self) -> u64 {
        self.instructions.values().sum()
    }

    /// Executed warp instructions whose opcode starts with `prefix`.
    pub fn count(&self, prefix: &str) -> u64 {
        let matching = self.instructions.iter().filter(|(opcode, _)| opcode.starts_with(prefix));
        matching.map(|(_, count)| count).sum()
    }
}

/// Counts the sectors of one direction of traffic, for warp instructions and for the running block.
#[derive(Default)]
pub(crate) struct Sectors {
    of_block: HashSet<u64, BuildHasherDefault<SectorHasher>>,
}

/// A hash for numbers that nobody chooses to collide: one multiplication.
#[derive(Default)]
struct SectorHasher(u64);

impl Hasher for SectorHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u64(&mut self, number: u64) {
        // 2^64 by the golden ratio; the table takes its index from the low bits.
        let product = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ product >> 32;
    }
}

impl Sectors {
    /// Number of distinct sectors among the addresses of one warp's accesses.
    pub fn touch(&mut self, addresses: impl Iterator<Item = u64>) -> u64 {
        let mut sectors = [0u64; 32];
        let (mut count, mut ordered) = (0, true);
        for address in addresses {
            let sector = address / 32;
            if count > 0 && sectors[count - 1] == sector {
                continue;
            }
            ordered &= count == 0 || sectors[count - 1] < sector;
            sectors[count] = sector;
            count += 1;
        }
        let sectors = &mut sectors[..count];
        self.of_block.extend(sectors.iter().copied());
        if !ordered {
            sectors.sort_unstable();
        }
        let repeats = sectors.windows(2).filter(|pair| pair[0] == pair[1]).count();
        (count - repeats) as u64
    }

    /// Number of distinct sectors since the last call.
    pub fn end_block(&mut self) -> u64 {
        let count = self.of_block.len() as u64;
        self.of_block.clear();
        count
    }
}
