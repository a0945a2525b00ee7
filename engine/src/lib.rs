//! Quire's engine: everything a request passes through.
//!
//! ```text
//! requests ─▶ Scheduler.schedule() ─▶ StepPlan ─▶ runner (prepare) ─▶ ForwardInput
//!          ─▶ Model::forward over Backend ops ─▶ logits rows ─▶ sampler
//!          ─▶ Scheduler.update() ─▶ detokenise, stop check ─▶ RequestOutput
//! ```
//!
//! One module a concept. The scheduler and the block pool know tokens and blocks, never tensors,
//! clocks or I/O; ops know tensors, never sequences; models never name a backend.
#![deny(unsafe_code)]

pub mod backend;
pub mod config;
pub mod engine;
pub mod kv;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod ops;
pub mod runner;
pub mod sampling;
pub mod scheduler;
pub mod text;

pub use crate::engine::{
    BeamScore, Engine, EngineError, FinishReason, Llm, Request, RequestDelta, RequestError,
    RequestId, RequestMetrics, RequestOutput, StepOutput, StopReason, derived_seed,
};
pub use config::EngineConfig;
pub use ops::{Backend, BackendError, DType};
pub use sampling::{SamplingParams, TokenLogprobs};
