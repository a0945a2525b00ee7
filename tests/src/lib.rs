//! Oracle, strategies, property, conformance and golden tests of Quire.
//!
//! * [`failing`]: a backend whose steps fail.
//! * [`fixtures`]: a tiny random model built in memory, and where the recorded files are.
//! * [`harness`]: one op at a time on any backend, with inputs that arrive bit for bit.
//! * [`conformance`]: the cases of each op, and how far two backends may differ.
//! * [`oracle`]: a request run alone, and what two runs must agree on.
//! * [`ptx`]: the kernels of `kernels-ptx`, launched in the PTX interpreter.
//! * [`roofline`]: the bytes that each of those kernels must move.
//! * [`sim`]: deterministic simulation of the scheduler and the block pool.
//! * [`strategies`]: proptest strategies for shapes, ragged batches and request mixes.
#![forbid(unsafe_code)]

pub mod conformance;
pub mod failing;
pub mod fixtures;
pub mod harness;
pub mod oracle;
pub mod ptx;
pub mod rng;
pub mod roofline;
pub mod sim;
pub mod strategies;
