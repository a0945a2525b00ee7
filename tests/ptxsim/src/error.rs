//! What can go wrong: text that is not understood, a launch that cannot be, a fault at run time.

use std::fmt;

/// A line of PTX that is outside of the subset this crate gives a meaning to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}: `{text}`")]
pub struct ParseError {
    /// Line of the file, from 1.
    pub line: usize,
    /// The statement as written, white space collapsed.
    pub text: String,
    /// What is wrong with it.
    pub reason: String,
}

/// Why a launch did not run to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimError {
    /// The launch does not fit the kernel, or asks for what no device has.
    #[error("kernel {kernel}: {reason}")]
    Launch {
        /// The entry that was asked for.
        kernel: String,
        /// What does not fit.
        reason: String,
    },
    /// The host touched memory that is not there or holds nothing yet.
    #[error("host access: {0}")]
    Host(String),
    /// The kernel did something wrong.
    #[error(transparent)]
    Fault(#[from] Box<Fault>),
}

impl SimError {
    /// What the kernel did wrong, where this is a fault.
    pub fn fault(&self) -> Option<&FaultKind> {
        match self {
            SimError::Fault(fault) => Some(&fault.kind),
            SimError::Launch { .. } | SimError::Host(_) => None,
        }
    }
}

/// A fault of one instruction, with everything needed to find it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Fault {
    /// The entry that ran.
    pub kernel: String,
    /// Line of the PTX file, from 1.
    pub line: usize,
    /// The instruction as written, white space collapsed.
    pub text: String,
    /// `%ctaid` of the block.
    pub cta: [u32; 3],
    /// Warp within the block.
    pub warp: usize,
    /// Lane within the warp, where one lane is to blame.
    pub lane: Option<usize>,
    /// What happened.
    pub kind: FaultKind,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.cta;
        write!(f, "kernel {}, line {}: `{}`, ", self.kernel, self.line, self.text)?;
        write!(f, "CTA ({x}, {y}, {z}), warp {}", self.warp)?;
        if let Some(lane) = self.lane {
            write!(f, ", lane {lane}")?;
        }
        write!(f, ": {}", self.kind)
    }
}

/// Whether memory was read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A load.
    Read,
    /// A store.
    Write,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Access::Read => "read",
            Access::Write => "write",
        })
    }
}

/// A state space that addresses point into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Device memory.
    Global,
    /// The block's own memory.
    Shared,
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Space::Global => "global",
            Space::Shared => "shared",
        })
    }
}

/// The kinds of fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultKind {
    /// An access outside of what was allocated.
    #[error("{space} {access} of {bytes} bytes at {address:#x} is out of bounds: {place}")]
    OutOfBounds {
        /// Which memory.
        space: Space,
        /// Load or store.
        access: Access,
        /// Bytes the lane asked for.
        bytes: usize,
        /// First byte.
        address: u64,
        /// Where that is with respect to the nearest allocation.
        place: String,
    },
    /// An address that is not a multiple of the size of the access.
    #[error("{space} {access} of {bytes} bytes at {address:#x} is misaligned: {place}")]
    Misaligned {
        /// Which memory.
        space: Space,
        /// Load or store.
        access: Access,
        /// Bytes the lane asked for, and the alignment that this needs.
        bytes: usize,
        /// First byte.
        address: u64,
        /// Where that is with respect to its allocation.
        place: String,
    },
    /// A value that nothing defined is used where it matters.
    #[error("uninitialised {what}")]
    Uninitialised {
        /// Its role in the instruction.
        what: &'static str,
    },
    /// A shared byte is touched between a `cp.async` to it and the `wait_group` that lands it.
    #[error("shared {access} at {address:#x}, where a cp.async is still in flight")]
    InFlight {
        /// Load or store.
        access: Access,
        /// The byte.
        address: u64,
    },
    /// Two warps touch a shared byte with no barrier between, and one of them changes it.
    #[error("shared {access} at {address:#x} races with a {other} by {by}; no barrier between")]
    SharedRace {
        /// What this warp does.
        access: Access,
        /// The byte.
        address: u64,
        /// What was done before.
        other: Access,
        /// The warp that did it.
        by: String,
    },
    /// A global byte that another warp of the block wrote is touched with no barrier between.
    #[error("global {access} at {address:#x} ({place}) races with a write by warp {by}")]
    GlobalRace {
        /// What this warp does.
        access: Access,
        /// The byte.
        address: u64,
        /// Where that is with respect to its allocation.
        place: String,
        /// The warp that wrote.
        by: usize,
    },
    /// Two blocks of one launch touch a global byte, the first one wrote it.
    #[error("global {access} at {address:#x} ({place}): CTA number {by} of this launch wrote it")]
    CtaRace {
        /// What this block does.
        access: Access,
        /// The byte.
        address: u64,
        /// Where that is with respect to its allocation.
        place: String,
        /// Linear index of the block that wrote.
        by: u32,
    },
    /// Not every thread of the block comes to the same barrier.
    #[error("divergent barrier: {reason}")]
    DivergentBarrier {
        /// Who is where.
        reason: String,
    },
    /// A whole-warp instruction that some lanes do not execute.
    #[error("the whole warp must execute this; the lanes here are {lanes:#010x}")]
    PartialWarp {
        /// Lanes that do.
        lanes: u32,
    },
    /// A lane reads a register of a lane that does not take part in the shuffle.
    #[error("shuffle reads lane {from}, which is not among the lanes here, {lanes:#010x}")]
    Shuffle {
        /// Lane read from.
        from: usize,
        /// Lanes that take part.
        lanes: u32,
    },
    /// `bra.uni` of which some lanes are taken and some not.
    #[error("bra.uni diverges: taken by {taken:#010x} of {lanes:#010x}")]
    DivergentUniformBranch {
        /// Lanes that branch.
        taken: u32,
        /// Lanes here.
        lanes: u32,
    },
    /// A `cp.async` that is asked to read more than it copies.
    #[error("cp.async of {size} bytes reads {from_bytes}")]
    CopySize {
        /// Bytes copied.
        size: usize,
        /// Bytes to read.
        from_bytes: u64,
    },
    /// Two lanes of one store write different values to one address.
    #[error("lanes {first} and {second} store different values to {address:#x}")]
    ConflictingStore {
        /// The lower lane.
        first: usize,
        /// The higher lane.
        second: usize,
        /// Where both write.
        address: u64,
    },
    /// The limit of `Options::max_warp_instructions` is reached: a loop that does not end.
    #[error("no end after {limit} warp instructions")]
    Runaway {
        /// The limit.
        limit: u64,
    },
}
