//! A rule of one's own for the next token, registered under a name that requests ask for:
//! `cargo run --release -p quire-model-zoo --example logits_processor -- MODEL`.

use quire_engine::sampling::{LogitsContext, LogitsProcessor};
use quire_engine::{Llm, Request, SamplingParams};
use quire_model_zoo::{LoadOptions, load};
use std::path::PathBuf;
use std::sync::Arc;

/// Forbids tokens that would repeat three tokens in a row of the output.
///
/// It looks at its arguments alone, as every processor must: so a request's tokens do not depend
/// on what else is in the batch.
struct NoRepeatedTrigram;

impl LogitsProcessor for NoRepeatedTrigram {
    fn process(&self, context: &LogitsContext<'_>, logits: &mut [f32]) {
        let Some(last) = context.output.last_chunk::<2>() else { return };
        for trigram in context.output.windows(3).filter(|trigram| trigram.starts_with(last)) {
            logits[trigram[2] as usize] = f32::NEG_INFINITY;
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model: PathBuf = std::env::args_os().nth(1).ok_or("usage: logits_processor MODEL")?.into();
    let mut engine = load(&model, &LoadOptions::default())?;
    engine.register_logits_processor("no_repeated_trigram", Arc::new(NoRepeatedTrigram));
    let plain = SamplingParams { max_tokens: Some(48), temperature: 0.0, ..Default::default() };
    let processor = Some("no_repeated_trigram".to_owned());
    let ruled = SamplingParams { logits_processor: processor, ..plain.clone() };

    // Both run in one batch; the rule holds for the request that asks for it.
    let prompt = "She said: no, no, no,";
    let requests = vec![Request::new(prompt, plain), Request::new(prompt, ruled)];
    for (label, output) in ["without", "with"].iter().zip(Llm::new(engine).generate(requests)?) {
        println!("{label} the rule: {prompt}{}\n", output.text);
    }
    Ok(())
}
