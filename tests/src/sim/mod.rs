//! Deterministic simulation of the scheduler and the block pool: the real ones, under a driver
//! that decides everything from a seed.
//!
//! ```text
//!  seed ─▶ limits, policies, operations ([`ops`])
//!            │ requests, aborts, faults            plan and block tables
//!            ▼                                      as they are when it is made
//!         driver ([`driver`]) ──▶ Scheduler ──▶ checks of the plan ──▶ device ([`device`])
//!            ▲                                    (`policy`)        in order, late by run-ahead
//!            └──────────── tokens: hashes of true histories ([`fake`]) ◀──────┘
//! ```
//!
//! * Each slot of the fake device and of its host memory holds what was written to it: the hash
//!   of the token history up to its position, and the position. A step makes its transfers, then
//!   all writes, then all reads, each of which must find its own history.
//! * What a request gives must be what it gives alone, however it was scheduled; it ends once;
//!   when all have ended, every block is back. `check_integrity` runs after every operation.
//! * Safety: any fault at any time (aborts, failed steps that get some way, emptied caches, other
//!   budgets). Liveness: then faults stop, and all that is left ends within a bound of steps.
//! * A seed that fails is told with its limits, the fewest operations that still fail and what
//!   they do; `make sim SEED=n` does it again.
//!
//! # Planted faults
//! Each was put into the scheduler or the pool by hand, one at a time; this is what sees it.
//!
//! | fault | seen by |
//! | --- | --- |
//! | blocks of a sequence that ended in flight are lost | `ref_cnt` differs from the tables |
//! | names of blocks that a failed step was to write stay | device: reads an unwritten slot |
//! | a fork takes the partial block without a copy planned | device: reads an unwritten slot |
//! | a block is taken one token late | integrity: tokens without blocks |
//! | a block is published one token early | device: reads an unwritten slot |
//! | the victim is the second, not the last | assertion: victims come from the end |
//! | a block's name without its parent | device: reads another history |
//! | no copy before writing to a shared block | device: a slot written twice in a step |
//! | a copy made in the table, not in the plan | device: reads an unwritten slot |
//! | swapped out, device blocks not released | `ref_cnt` differs from the tables |
//! | swapped out although others hold the block | policy: held by others too |
//! | the window frees a token early | device: reads a freed block |
//! | a hit within a window is a token short | device: reads a freed block |
//! | a failed step's placeholders stay | assertion: a step without progress |
//! | one that was preempted comes back without blocks to spare | policy: came back too early |
//! | a full hit leaves no token to compute | assertion: a step without progress |
//! | the last token of a full hit is written again | device: a slot written twice in a step |
//! | the salt does not go into names | device: reads another history |
//! | one that was preempted goes to the end of the queue | policy: admitted out of order |
//! | beams take one seat | integrity: seats kept for beams |
//! | a fork copies what the same step writes | device: reads another history (seed 3754) |
//! | beams swapped in share the block they write | device: a slot written twice in a step |
//! | priorities without age | policy: admitted out of order |
//! | admission in a step that ran short of blocks | policy: admitted while preempting |
//! | an ended swapped sequence keeps its host blocks | `ref_cnt` differs from the tables |
//! | copies of a failed step whose beams were not computed | device: reads another history (seed 49918) |
//! | blocks left behind by swapped samples are never taken back | assertion: a step without progress |
//!
//! Not seen, as plans are executed in order: host blocks of a swap under way that are given back
//! at once instead of when it is over.

pub mod device;
pub mod driver;
pub mod fake;
pub mod ops;
mod policy;
mod run;
mod totals;

pub use driver::Sim;
pub use ops::{Op, SimConfig};
pub use run::{Outcome, explain, run_seed, run_seeds};
pub use totals::Totals;
