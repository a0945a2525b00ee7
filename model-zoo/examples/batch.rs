//! Continues a few prompts together and prints them in order:
//! `cargo run --release -p quire-model-zoo --example batch -- MODEL`.

use quire_engine::{Llm, Request, SamplingParams};
use quire_model_zoo::{LoadOptions, load};
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model: PathBuf = std::env::args_os().nth(1).ok_or("usage: batch MODEL")?.into();
    let mut llm = Llm::new(load(&model, &LoadOptions::default())?);
    let params = SamplingParams { max_tokens: Some(32), temperature: 0.0, ..Default::default() };
    let prompts = ["The capital of France is", "Water boils at", "Once upon a time"];
    let requests = prompts.iter().map(|&p| Request::new(p, params.clone())).collect();
    for (prompt, output) in prompts.iter().zip(llm.generate(requests)?) {
        println!("{prompt}{}\n", output.text);
    }
    println!("{} steps", llm.engine().stats().num_steps);
    Ok(())
}
