//! Loads, stores, `cp.async` and `ldmatrix`.

use std::collections::VecDeque;

use super::lanewise::read_element;
use super::registers::Registers;
use super::warp::Context;
use super::{LaneFault, lanes};
use crate::alu::{LANES, Lanes};
use crate::error::{Access, FaultKind};
use crate::program::{Address, Kernel, Load, Op, Store};

/// The largest access of a lane, in bytes.
const MAX_BYTES: usize = 16;

/// The most elements that a lane loads at once.
const MAX_ELEMENTS: usize = 4;

/// The address of each lane, of which those in `mask` must be defined.
fn addresses(
    r: &Registers,
    kernel: &Kernel,
    address: Address,
    mask: u32,
) -> Result<Lanes, LaneFault> {
    let base = r.defined(kernel, address.base, mask, "address")?;
    Ok(base.map(|base| base.wrapping_add(address.offset as u64)))
}

/// What the lanes of a load get, by element.
struct Loaded {
    values: [Lanes; MAX_ELEMENTS],
    undefined: [u32; MAX_ELEMENTS],
}

impl Default for Loaded {
    fn default() -> Self {
        Loaded { values: [[0; LANES]; MAX_ELEMENTS], undefined: [0; MAX_ELEMENTS] }
    }
}

impl Loaded {
    fn set_values(&mut self, lane: usize, load: &Load, data: &[u8]) {
        let elements = data.chunks_exact(load.element.bytes);
        for (values, element) in self.values.iter_mut().zip(elements) {
            values[lane] = read_element(element, load.element, load.dst_bits);
        }
    }

    fn set_undefined(&mut self, lane: usize, load: &Load, is_undefined: impl Fn(usize) -> bool) {
        let elements = load.dsts.len();
        for (i, undefined) in self.undefined.iter_mut().enumerate().take(elements) {
            *undefined |= u32::from(is_undefined(i)) << lane;
        }
    }

    fn write(&self, r: &mut Registers, load: &Load, mask: u32) {
        for (i, dst) in load.dsts.iter().enumerate() {
            if let Some(dst) = *dst {
                r.write(dst, mask, &self.values[i], self.undefined[i]);
            }
        }
    }
}

pub(super) fn load_global(
    r: &mut Registers,
    load: &Load,
    mask: u32,
    context: &mut Context<'_, '_>,
) -> Result<(), LaneFault> {
    let by = context.toucher();
    let machine = &mut *context.machine;
    let addresses = addresses(r, machine.kernel, load.address, mask)?;
    let size = load.element.bytes;
    let bytes = size * load.dsts.len();
    let mut loaded = Loaded::default();
    for lane in lanes(mask) {
        let fault = LaneFault::at(lane);
        let span =
            machine.memory.check(Access::Read, addresses[lane], bytes, bytes).map_err(&fault)?;
        let data = machine.memory.load(span, by).map_err(&fault)?;
        loaded.set_values(lane, load, data);
        if !machine.memory.is_defined(span) {
            loaded.set_undefined(lane, load, |i| !machine.memory.is_defined(span.element(i, size)));
        }
    }
    loaded.write(r, load, mask);
    let traffic = &mut machine.profile.global;
    traffic.read_bytes += bytes as u64 * u64::from(mask.count_ones());
    traffic.read_sectors += machine.read.touch(lanes(mask).map(|lane| addresses[lane]));
    Ok(())
}

pub(super) fn load_shared(
    r: &mut Registers,
    load: &Load,
    mask: u32,
    context: &mut Context<'_, '_>,
) -> Result<(), LaneFault> {
    let machine = &mut *context.machine;
    let addresses = addresses(r, machine.kernel, load.address, mask)?;
    let size = load.element.bytes;
    let bytes = size * load.dsts.len();
    let mut loaded = Loaded::default();
    for lane in lanes(mask) {
        let fault = LaneFault::at(lane);
        let offset = machine.shared.check(Access::Read, addresses[lane], bytes).map_err(&fault)?;
        let data = machine.shared.load(offset, bytes, context.warp).map_err(&fault)?;
        loaded.set_values(lane, load, data);
        if !machine.shared.is_defined(offset, bytes) {
            let is_defined = |i: usize| machine.shared.is_defined(offset + i * size, size);
            loaded.set_undefined(lane, load, |i| !is_defined(i));
        }
    }
    loaded.write(r, load, mask);
    machine.profile.shared.read_bytes += bytes as u64 * u64::from(mask.count_ones());
    Ok(())
}

/// What each lane of a store writes where.
struct Writes {
    addresses: Lanes,
    data: [[u8; MAX_BYTES]; 32],
    bytes: usize,
    /// Lanes of which some value is undefined.
    undefined: u32,
}

impl Writes {
    fn new(r: &Registers, kernel: &Kernel, store: &Store, mask: u32) -> Result<Writes, LaneFault> {
        let addresses = addresses(r, kernel, store.address, mask)?;
        let size = store.element.bytes;
        let (mut data, mut undefined) = ([[0; MAX_BYTES]; 32], 0);
        for (i, &src) in store.srcs.iter().enumerate() {
            for (lane, value) in r.value(kernel, src).iter().enumerate() {
                data[lane][i * size..][..size].copy_from_slice(&value.to_le_bytes()[..size]);
            }
            undefined |= r.undefined(src) & mask;
        }
        let writes = Writes { addresses, data, bytes: size * store.srcs.len(), undefined };
        writes.check_conflicts(mask)?;
        Ok(writes)
    }

    fn of(&self, lane: usize) -> &[u8] {
        &self.data[lane][..self.bytes]
    }

    /// Lanes that write to one address write the same.
    fn check_conflicts(&self, mask: u32) -> Result<(), LaneFault> {
        let mut last = None;
        let ascending = lanes(mask).all(|lane| {
            let address = self.addresses[lane];
            last.replace(address).is_none_or(|last| last < address)
        });
        if ascending {
            return Ok(());
        }
        let defined = mask & !self.undefined;
        for second in lanes(defined) {
            for first in lanes(defined & ((1 << second) - 1)) {
                let address = self.addresses[second];
                if self.addresses[first] == address && self.of(first) != self.of(second) {
                    let kind = FaultKind::ConflictingStore { first, second, address };
                    return Err(LaneFault::at(second)(kind));
                }
            }
        }
        Ok(())
    }
}

pub(super) fn store_global(
    r: &mut Registers,
    store: &Store,
    mask: u32,
    context: &mut Context<'_, '_>,
) -> Result<(), LaneFault> {
    let by = context.toucher();
    let machine = &mut *context.machine;
    let writes = Writes::new(r, machine.kernel, store, mask)?;
    if let Some(lane) = lanes(writes.undefined).next() {
        let what = "value stored to global memory";
        return Err(LaneFault::at(lane)(FaultKind::Uninitialised { what }));
    }
    let bytes = writes.bytes;
    for lane in lanes(mask) {
        let fault = LaneFault::at(lane);
        let address = writes.addresses[lane];
        let span = machine.memory.check(Access::Write, address, bytes, bytes).map_err(&fault)?;
        machine.memory.store(span, writes.of(lane), by).map_err(&fault)?;
    }
    let traffic = &mut machine.profile.global;
    traffic.written_bytes += bytes as u64 * u64::from(mask.count_ones());
    traffic.written_sectors +=
        machine.written.touch(lanes(mask).map(|lane| writes.addresses[lane]));
    Ok(())
}

pub(super) fn store_shared(
    r: &mut Registers,
    store: &Store,
    mask: u32,
    context: &mut Context<'_, '_>,
) -> Result<(), LaneFault> {
    let machine = &mut *context.machine;
    let writes = Writes::new(r, machine.kernel, store, mask)?;
    for lane in lanes(mask) {
        let fault = LaneFault::at(lane);
        let address = writes.addresses[lane];
        let offset = machine.shared.check(Access::Write, address, writes.bytes).map_err(&fault)?;
        let defined = writes.undefined >> lane & 1 == 0;
        machine.shared.store(offset, writes.of(lane), defined, context.warp).map_err(&fault)?;
    }
    machine.profile.shared.written_bytes += writes.bytes as u64 * u64::from(mask.count_ones());
    Ok(())
}

/// A copy that has not landed.
struct Copy {
    /// In shared memory.
    offset: usize,
    data: [u8; MAX_BYTES],
    bytes: usize,
    defined: bool,
}

/// The asynchronous copies of a warp. Groups are counted for the warp as a whole, so that
/// committing and waiting are for all its lanes.
#[derive(Default)]
pub(super) struct Copies {
    open: Vec<Copy>,
    groups: VecDeque<Vec<Copy>>,
}

impl Copies {
    /// `cp.async`: global memory is read now, shared memory written when the group is waited for.
    pub fn issue(
        &mut self,
        r: &Registers,
        op: &Op,
        mask: u32,
        context: &mut Context<'_, '_>,
    ) -> Result<(), LaneFault> {
        let Op::CopyAsync { to, from, size, from_bytes } = *op else { unreachable!("{op:?}") };
        let by = context.toucher();
        let machine = &mut *context.machine;
        let to = addresses(r, machine.kernel, to, mask)?;
        let sizes = match from_bytes {
            Some(src) => r.defined(machine.kernel, src, mask, "size of the copy")?,
            None => [size as u64; 32],
        };
        let reading = lanes(mask).filter(|&lane| sizes[lane] > 0).fold(0, |m, lane| m | 1 << lane);
        let from = addresses(r, machine.kernel, from, reading)?;
        for lane in lanes(mask) {
            let fault = LaneFault::at(lane);
            let bytes = usize::try_from(sizes[lane]).unwrap_or(usize::MAX);
            if bytes > size {
                return Err(fault(FaultKind::CopySize { size, from_bytes: sizes[lane] }));
            }
            let offset = machine.shared.check(Access::Write, to[lane], size).map_err(&fault)?;
            let (mut data, mut defined) = ([0; MAX_BYTES], true);
            if bytes > 0 {
                let span = machine.memory.check(Access::Read, from[lane], bytes, size);
                let span = span.map_err(&fault)?;
                let loaded = machine.memory.load(span, by).map_err(&fault)?;
                data[..bytes].copy_from_slice(loaded);
                defined = machine.memory.is_defined(span);
            }
            machine.shared.begin_copy(offset, size, context.warp).map_err(&fault)?;
            self.open.push(Copy { offset, data, bytes: size, defined });
            machine.profile.global.read_bytes += bytes as u64;
        }
        machine.profile.shared.written_bytes += size as u64 * u64::from(mask.count_ones());
        machine.profile.global.read_sectors +=
            machine.read.touch(lanes(reading).map(|lane| from[lane]));
        Ok(())
    }

    pub fn commit(&mut self, mask: u32) -> Result<(), LaneFault> {
        super::collective::check_whole(mask)?;
        self.groups.push_back(std::mem::take(&mut self.open));
        Ok(())
    }

    /// Lands all groups but the latest `keep`.
    pub fn wait(
        &mut self,
        keep: usize,
        mask: u32,
        context: &mut Context<'_, '_>,
    ) -> Result<(), LaneFault> {
        super::collective::check_whole(mask)?;
        while self.groups.len() > keep {
            for copy in self.groups.pop_front().into_iter().flatten() {
                let Copy { offset, data, bytes, defined } = copy;
                let shared = &mut context.machine.shared;
                shared
                    .land(offset, &data[..bytes], defined, context.warp)
                    .map_err(LaneFault::warp)?;
            }
        }
        Ok(())
    }
}

/// `ldmatrix`: lane 8·j + i has the address of row i of matrix j; lane 4·p + q gets elements
/// (p, 2q) and (p, 2q + 1) of each matrix, or (2q, p) and (2q + 1, p) when it is transposed.
pub(super) fn load_matrix(
    r: &mut Registers,
    op: &Op,
    mask: u32,
    context: &mut Context<'_, '_>,
) -> Result<(), LaneFault> {
    let Op::LoadMatrix { dsts, address, transposed } = op else { unreachable!("{op:?}") };
    super::collective::check_whole(mask)?;
    let machine = &mut *context.machine;
    let used = u32::MAX >> (32 - 8 * dsts.len());
    let addresses = addresses(r, machine.kernel, *address, used)?;
    for (j, &dst) in dsts.iter().enumerate() {
        let mut matrix = [[(0u16, true); 8]; 8];
        for (i, row) in matrix.iter_mut().enumerate() {
            let fault = LaneFault::at(8 * j + i);
            let offset =
                machine.shared.check(Access::Read, addresses[8 * j + i], 16).map_err(&fault)?;
            let data = machine.shared.load(offset, 16, context.warp).map_err(&fault)?;
            for (element, pair) in row.iter_mut().zip(data.chunks_exact(2)) {
                element.0 = u16::from_le_bytes([pair[0], pair[1]]);
            }
            if !machine.shared.is_defined(offset, 16) {
                for (column, element) in row.iter_mut().enumerate() {
                    element.1 = machine.shared.is_defined(offset + 2 * column, 2);
                }
            }
        }
        for lane in 0..32 {
            let (p, q) = (lane / 4, 2 * (lane % 4));
            let (low, high) = match transposed {
                false => (matrix[p][q], matrix[p][q + 1]),
                true => (matrix[q][p], matrix[q + 1][p]),
            };
            let value = u64::from(low.0) | u64::from(high.0) << 16;
            r.write_lane(dst, lane, value, low.1 && high.1);
        }
    }
    machine.profile.shared.read_bytes += 128 * dsts.len() as u64;
    Ok(())
}
