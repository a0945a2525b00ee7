//! A PTX interpreter for the kernels that Quire ships for sm_80: tests without a GPU.
//!
//! It runs the exact text that a driver would compile, one warp after the other, and is strict
//! where hardware is silent:
//!
//! * An opcode, modifier, type, directive or operand form that it does not know is an error with
//!   its line ([`ParseError`]).
//! * Every access is checked for bounds, alignment and for the allocation its address was derived
//!   from ([`Memory`]).
//! * Registers, shared memory and fresh global memory start undefined. Arithmetic, `selp`, shared
//!   memory, shuffles and `mma` carry that along; it is an error where it reaches an address, a
//!   guard, a vote or a store to global memory.
//! * `cp.async` lands at its `wait_group`, and touching its bytes before is an error.
//! * A barrier that not all threads reach is an error; so is a byte that two warps touch
//!   between barriers when one changes it (in global memory: when the first one does), and a
//!   global byte that two blocks of a launch touch when the first one wrote it.
//!
//! A [`Fault`] names kernel, line, instruction, block, warp and lane.
//!
//! ```text
//! parse ─▶ Module (typed instructions) ─▶ launch ─▶ blocks ─▶ warps of 32 lanes ─▶ Profile
//!                                            ▲ Memory, Arg, Options
//! ```
//!
//! # What it does not show
//! Accumulation inside `mma` on hardware (here: f32, the addend first, then k in ascending order,
//! each sum rounded to nearest), the last bits of `.approx` instructions, lanes of one warp that
//! rely on running in lockstep, subnormals in `mma`, and how long anything takes.
#![forbid(unsafe_code)]

mod alu;
mod error;
mod exec;
mod memory;
mod parse;
mod profile;
mod program;
mod shared;

pub use error::{Access, Fault, FaultKind, ParseError, SimError, Space};
pub use exec::{Arg, CtaOrder, Launch, Options, launch};
pub use memory::Memory;
pub use profile::{Profile, Traffic};
pub use program::{Kernel, Module, Param, ParamType};
