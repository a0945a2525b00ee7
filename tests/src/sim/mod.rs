//! Deterministic simulation of the scheduler and the block pool.

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
