//! Model loading (Hugging Face folders, GGUF) and the decoder families.
//!
//! [`load`] takes a path to a running engine:
//!
//! ```no_run
//! use quire_engine::{Llm, Request, SamplingParams};
//! use quire_model_zoo::{LoadOptions, load};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = load("models/model.gguf".as_ref(), &LoadOptions::default())?;
//! let mut llm = Llm::new(engine);
//! let greedy = SamplingParams { temperature: 0.0, ..Default::default() };
//! for output in llm.generate(vec![Request::new("The capital of France is", greedy)])? {
//!     println!("{}", output.text);
//! }
//! # Ok(())
//! # }
//! ```

pub mod config;
pub mod decoder;
pub mod dequant;
pub mod error;
pub mod folder;
pub mod gguf;
pub mod loader;
mod mapped;
pub mod memory;
pub mod safetensors;
pub mod source;
pub mod spec;
pub mod trace;
pub mod verify;
pub mod weights;

pub use loader::{BackendKind, LoadOptions, ModelError, ModelFiles, load};

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
