//! Logits processors: one that works, and two that spoil their request.

use quire_engine::Engine;
use quire_engine::sampling::{LogitsContext, LogitsProcessor};
use std::sync::Arc;

/// Prefers ids that follow from the whole sequence so far.
struct Walk;

impl LogitsProcessor for Walk {
    fn process(&self, context: &LogitsContext<'_>, logits: &mut [f32]) {
        let sum: u32 = context.prompt.iter().chain(context.output).sum();
        for id in sum..sum + 30 {
            logits[id as usize % 256] += 4.0;
        }
    }
}

/// Panics at the third token, having spoilt the logits.
struct Panics;

impl LogitsProcessor for Panics {
    fn process(&self, context: &LogitsContext<'_>, logits: &mut [f32]) {
        if context.output.len() == 2 {
            logits.fill(f32::INFINITY);
            panic!("at the third token");
        }
    }
}

/// Makes every logit NaN.
struct Spoils;

impl LogitsProcessor for Spoils {
    fn process(&self, _: &LogitsContext<'_>, logits: &mut [f32]) {
        logits.fill(f32::NAN);
    }
}

/// The names of these processors.
pub const PROCESSORS: [&str; 3] = ["panics", "spoils", "walk"];

/// Gives an engine all of [`PROCESSORS`].
pub fn register(engine: &mut Engine) {
    engine.register_logits_processor("walk", Arc::new(Walk));
    engine.register_logits_processor("panics", Arc::new(Panics));
    engine.register_logits_processor("spoils", Arc::new(Spoils));
}
