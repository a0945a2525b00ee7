//! Device memory: allocations and their limits. What they hold is
//! [`quire_ptxsim::Memory`]'s.

use crate::code::{self, Result};
use crate::driver::{Allocation, Driver};

/// An allocation takes a multiple of this from the device.
const GRANULE: usize = 512;

fn taken(bytes: usize) -> usize {
    bytes.next_multiple_of(GRANULE)
}

impl Driver {
    pub fn free_bytes(&self, device: usize) -> usize {
        self.config.device_bytes - self.devices[device].used
    }

    pub fn alloc(&mut self, device: usize, bytes: usize) -> Result<u64> {
        if bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        if bytes > self.config.device_bytes {
            return Err(code::OUT_OF_MEMORY);
        }
        if taken(bytes) > self.free_bytes(device) {
            // Memory that is to be given back by work may serve, once that has run.
            self.run_all(device);
            if taken(bytes) > self.free_bytes(device) {
                return Err(code::OUT_OF_MEMORY);
            }
        }
        self.devices[device].used += taken(bytes);
        self.stats.allocations += 1;
        let name = format!("device memory #{}", self.stats.allocations);
        let address = self.memory.alloc_uninit(&name, bytes);
        self.allocations.insert(address, Allocation { device, bytes, freeing: false });
        self.stats.live_bytes += bytes as u64;
        self.stats.peak_bytes = self.stats.peak_bytes.max(self.stats.live_bytes);
        Ok(address)
    }

    /// The allocation that starts at `address` and nobody has given back.
    pub fn allocation(&self, address: u64, device: usize) -> Result<&Allocation> {
        let found = self.allocations.get(&address);
        let found = found.filter(|found| found.device == device && !found.freeing);
        found.ok_or(code::INVALID_VALUE)
    }

    /// The program has given an allocation back; work will remove it.
    pub fn begin_free(&mut self, address: u64) {
        let found = self.allocations.get_mut(&address).expect("an allocation");
        found.freeing = true;
        self.stats.live_bytes -= found.bytes as u64;
    }

    /// Removes an allocation.
    pub fn give_back(&mut self, address: u64) {
        let found = self.allocations.remove(&address).expect("an allocation");
        self.devices[found.device].used -= taken(found.bytes);
        if !found.freeing {
            self.stats.live_bytes -= found.bytes as u64;
        }
        self.memory.free(address).expect("both tables agree");
    }

    /// All of the bytes must be in one allocation.
    pub fn check_range(&self, address: u64, bytes: usize) -> Result {
        let before = self.allocations.range(..=address).next_back();
        let inside = before.is_some_and(|(start, found)| {
            let end = (address - start).checked_add(bytes as u64);
            end.is_some_and(|end| end <= found.bytes as u64)
        });
        if inside { Ok(()) } else { Err(code::INVALID_VALUE) }
    }
}
