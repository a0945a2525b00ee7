//! What a launch did, counted.

use std::collections::BTreeMap;

/// Counts of one launch; [`Profile::add`] sums several.
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

    /// FLOPs for each byte of global traffic.
    pub fn intensity(&self) -> f64 {
        let bytes = self.global.read_bytes + self.global.written_bytes;
        self.flops as f64 / bytes.max(1) as f64
    }

    /// Adds the counts of another launch.
    pub fn add(&mut self, other: &Profile) {
        for (opcode, count) in &other.instructions {
            *self.instructions.entry(opcode.clone()).or_default() += count;
        }
        self.flops += other.flops;
        self.blocks += other.blocks;
        for (to, from) in [(&mut self.global, other.global), (&mut self.shared, other.shared)] {
            to.read_bytes += from.read_bytes;
            to.written_bytes += from.written_bytes;
            to.read_sectors += from.read_sectors;
            to.written_sectors += from.written_sectors;
        }
    }
}

/// Number of distinct 32-byte sectors among the addresses of one warp's accesses.
pub(crate) fn sectors(addresses: impl Iterator<Item = u64>) -> u64 {
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
    if !ordered {
        sectors.sort_unstable();
    }
    let repeats = sectors.windows(2).filter(|pair| pair[0] == pair[1]).count();
    (count - repeats) as u64
}
