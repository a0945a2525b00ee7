//! Running a kernel.
//!
//! * [`block`]: the warps of a block between barriers · [`warp`]: one warp's control flow
//! * [`registers`]: the register file · [`lanewise`]: instructions without memory
//! * [`memory`]: loads, stores, copies · [`collective`]: `mma`, shuffles, votes

mod block;
mod collective;
mod lanewise;
mod memory;
mod registers;
mod warp;

use crate::memory::Memory;
use crate::profile::{Profile, Sectors};
use crate::program::{Kernel, Module, ParamType};
use crate::{SimError, error::FaultKind};

pub(crate) use crate::shared::SHARED_BASE;

/// Shared memory that a block of sm_80 may have, in bytes.
const MAX_SHARED_BYTES: usize = 163 * 1024;

/// Largest grid: x, y, z.
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// One kernel launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// Name of the entry.
    pub entry: &'a str,
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z: the kernel's `.reqntid`, 1, 1.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: usize,
    /// One for each parameter, in order.
    pub args: &'a [Arg],
}

/// An argument. Its kind must be the parameter's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// A signed 32-bit integer.
    I32(i32),
    /// An unsigned 32-bit integer.
    U32(u32),
    /// A float.
    F32(f32),
    /// A signed 64-bit integer.
    I64(i64),
    /// An unsigned 64-bit integer.
    U64(u64),
    /// An address in global memory.
    Pointer(u64),
}

impl Arg {
    fn fits(self, ty: ParamType) -> bool {
        match self {
            Arg::I32(_) | Arg::U32(_) => ty == ParamType::U32,
            Arg::F32(_) => ty == ParamType::F32,
            Arg::I64(_) | Arg::U64(_) => ty == ParamType::U64,
            Arg::Pointer(_) => ty == ParamType::Pointer,
        }
    }

    fn bits(self) -> u64 {
        match self {
            Arg::I32(value) => u64::from(value as u32),
            Arg::U32(value) => u64::from(value),
            Arg::F32(value) => u64::from(value.to_bits()),
            Arg::I64(value) => value as u64,
            Arg::U64(value) | Arg::Pointer(value) => value,
        }
    }
}

/// The order in which blocks run, one after the other; the warps of a block follow it too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CtaOrder {
    /// By rising index.
    #[default]
    Forward,
    /// By falling index.
    Reverse,
    /// In an order drawn from the seed.
    Shuffled(u64),
}

impl CtaOrder {
    /// The numbers below `count` in this order.
    fn indices(self, count: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..count).collect();
        match self {
            CtaOrder::Forward => {}
            CtaOrder::Reverse => order.reverse(),
            CtaOrder::Shuffled(seed) => {
                let mut state = seed;
                for i in (1..order.len()).rev() {
                    order.swap(i, (split_mix(&mut state) % (i as u64 + 1)) as usize);
                }
            }
        }
        order
    }
}

/// SplitMix64 (Steele, Lea, Flood, 2014).
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// How to run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Order of blocks and warps.
    pub order: CtaOrder,
    /// A launch that executes more is taken for one that never ends.
    pub max_warp_instructions: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options { order: CtaOrder::Forward, max_warp_instructions: 1 << 33 }
    }
}

/// Where a fault is within a warp.
#[derive(Debug)]
struct LaneFault {
    lane: Option<usize>,
    kind: FaultKind,
}

impl LaneFault {
    /// Blames one lane.
    fn at(lane: usize) -> impl Fn(FaultKind) -> LaneFault {
        move |kind| LaneFault { lane: Some(lane), kind }
    }

    /// Blames the warp.
    fn warp(kind: FaultKind) -> LaneFault {
        LaneFault { lane: None, kind }
    }
}

/// The lanes of a mask, ascending.
fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut left = mask;
    std::iter::from_fn(move || {
        let lane = left.trailing_zeros();
        left &= left.wrapping_sub(1);
        (lane < 32).then_some(lane as usize)
    })
}

/// What all blocks of a launch share.
struct Machine<'a> {
    kernel: &'a Kernel,
    params: Vec<u8>,
    grid: [u32; 3],
    memory: &'a mut Memory,
    shared: crate::shared::Shared,
    /// Warp instructions issued, by index of the instruction.
    issued: Vec<u64>,
    /// Sum of `issued`, and its limit.
    total: u64,
    limit: u64,
    profile: Profile,
    /// Sectors of global memory that are read and written.
    read: Sectors,
    written: Sectors,
}

/// Runs a kernel to its end.
///
/// # Errors
/// [`SimError::Launch`] where the launch does not fit the kernel, [`SimError::Fault`] at the first
/// fault; memory then holds what was written up to it.
pub fn launch(
    module: &Module,
    launch: &Launch<'_>,
    memory: &mut Memory,
    options: &Options,
) -> Result<Profile, SimError> {
    let refuse = |reason: String| SimError::Launch { kernel: launch.entry.into(), reason };
    let kernel = module.kernel(launch.entry).ok_or_else(|| {
        refuse(format!("no such entry; there is {:?}", module.entries().collect::<Vec<_>>()))
    })?;
    let params = check(kernel, launch).map_err(refuse)?;
    memory.begin_launch();
    let [x, y, z] = launch.grid;
    let blocks = u64::from(x) * u64::from(y) * u64::from(z);
    let blocks = u32::try_from(blocks)
        .ok()
        .filter(|&blocks| blocks < u32::MAX)
        .ok_or_else(|| refuse(format!("{blocks} blocks are more than this interpreter runs")))?;
    let mut machine = Machine {
        kernel,
        params,
        grid: launch.grid,
        memory,
        shared: crate::shared::Shared::new(launch.dynamic_shared),
        issued: vec![0; kernel.code.len()],
        total: 0,
        limit: options.max_warp_instructions,
        profile: Profile { blocks: blocks.into(), ..Profile::default() },
        read: Sectors::default(),
        written: Sectors::default(),
    };
    let warp_order = options.order.indices(kernel.threads / 32);
    let mut block = block::Block::new(kernel, warp_order);
    for index in options.order.indices(blocks) {
        block.run(&mut machine, index)?;
        machine.profile.global.read_footprint += machine.read.end_block();
        machine.profile.global.written_footprint += machine.written.end_block();
    }
    let mut profile = machine.profile;
    for (instr, &count) in kernel.code.iter().zip(&machine.issued).filter(|(_, n)| **n > 0) {
        *profile.instructions.entry(kernel.opcodes[instr.opcode].clone()).or_default() += count;
    }
    Ok(profile)
}

/// Whether a launch fits the kernel; its parameter block if so.
fn check(kernel: &Kernel, launch: &Launch<'_>) -> Result<Vec<u8>, String> {
    if launch.block != [kernel.threads, 1, 1] {
        return Err(format!("block {:?}, but .reqntid is {}", launch.block, kernel.threads));
    }
    for (axis, (&count, max)) in launch.grid.iter().zip(MAX_GRID).enumerate() {
        if count == 0 || count > max {
            let axis = ["x", "y", "z"][axis];
            return Err(format!("grid {axis} is {count}, which is not in 1..={max}"));
        }
    }
    if launch.dynamic_shared > MAX_SHARED_BYTES {
        let bytes = launch.dynamic_shared;
        return Err(format!("{bytes} bytes of shared memory; sm_80 has {MAX_SHARED_BYTES}"));
    }
    if launch.args.len() != kernel.params.len() {
        let (given, wanted) = (launch.args.len(), kernel.params.len());
        return Err(format!("{given} arguments for {wanted} parameters"));
    }
    let mut block = vec![0; kernel.params.last().map_or(0, |p| p.offset + p.ty.bytes())];
    for (i, (param, arg)) in kernel.params.iter().zip(launch.args).enumerate() {
        if !arg.fits(param.ty) {
            return Err(format!("argument {i} is {arg:?}, the parameter is a {}", param.ty));
        }
        let bytes = param.ty.bytes();
        block[param.offset..][..bytes].copy_from_slice(&arg.bits().to_le_bytes()[..bytes]);
    }
    Ok(block)
}
