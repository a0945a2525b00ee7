//! Oracle, strategies, property, conformance and golden tests of Quire.
//!
//! * [`checked`]: a backend whose every choice is made again on the host.
//! * [`failing`]: a backend whose steps fail.
//! * [`fixtures`]: a tiny random model built in memory, and where the recorded files are.
//! * [`harness`]: one op at a time on any backend, with inputs that arrive bit for bit.
//! * [`conformance`]: the cases of each op, and how far two backends may differ.
//! * [`mixes`]: random mixes of requests and settings, against each request alone.
//! * [`op_checks`]: what must hold of the ops of any backend.
//! * [`oracle`]: a request run alone, and what two runs must agree on.
//! * [`pools`]: blocks whose contents can be seen, and what moving them must do.
//! * [`processors`]: logits processors, good and bad.
//! * [`ptx`]: the kernels of `kernels-ptx`, launched in the PTX interpreter.
//! * [`roofline`]: the bytes that each of those kernels must move.
//! * [`sim`]: deterministic simulation of the scheduler and the block pool.
//! * [`strategies`]: proptest strategies for shapes, ragged batches and request mixes.
#![forbid(unsafe_code)]

pub mod checked;
pub mod conformance;
pub mod failing;
pub mod fixtures;
pub mod harness;
pub mod mixes;
pub mod op_checks;
pub mod oracle;
pub mod pools;
pub mod processors;
pub mod ptx;
pub mod rng;
pub mod roofline;
pub mod sim;
pub mod strategies;
