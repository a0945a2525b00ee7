//! Offline use: many prompts in, their outputs in the same order.

use super::{Engine, EngineError, Request, RequestError, RequestOutput};
use crate::sampling::SamplingParams;
use crate::text::chat::{ChatMessage, RenderOptions};
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::HashMap;

/// Why a batch could not be run.
#[derive(Debug, thiserror::Error)]
pub enum LlmError {
    /// A request was refused; none was run.
    #[error("request {index}: {source}")]
    Request {
        /// Its place in the batch.
        index: usize,
        /// Why.
        source: RequestError,
    },
    /// A step failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// An engine for batches: the simplest way to use Quire from Rust.
pub struct Llm {
    engine: Engine,
    progress: bool,
}

impl Llm {
    /// Wraps an engine. A progress bar is drawn when standard error is a terminal.
    pub fn new(engine: Engine) -> Self {
        Llm { engine, progress: true }
    }

    /// Turns the progress bar on or off.
    pub fn with_progress(mut self, progress: bool) -> Self {
        self.progress = progress;
        self
    }

    /// The engine, for its counters and for step-by-step use.
    pub fn engine(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Runs all requests together and returns their outputs in the order given; a request with
    /// `n` sequences has `n` outputs, one after the other.
    pub fn generate(&mut self, requests: Vec<Request>) -> Result<Vec<RequestOutput>, LlmError> {
        // Request → place of its first output.
        let mut places = HashMap::new();
        let mut outputs: Vec<Option<RequestOutput>> = Vec::new();
        for (index, request) in requests.into_iter().enumerate() {
            let n = request.params.n;
            match self.engine.add_request(request) {
                Ok(id) => places.insert(id, outputs.len()),
                Err(source) => {
                    places.keys().for_each(|&id| drop(self.engine.abort(id)));
                    return Err(LlmError::Request { index, source });
                }
            };
            outputs.extend((0..n).map(|_| None));
        }
        let bar = self.progress_bar(outputs.len());
        let mut tokens = 0;
        while self.engine.num_unfinished() > 0 {
            let step = self.engine.step().inspect_err(|_| {
                places.keys().for_each(|&id| drop(self.engine.abort(id)));
            })?;
            for output in step.finished {
                // Requests that were added to the engine itself are not ours.
                let Some(&place) = places.get(&output.request_id) else { continue };
                tokens += output.token_ids.len();
                bar.inc(1);
                let rate = tokens as f64 / bar.elapsed().as_secs_f64();
                bar.set_message(format!("{rate:.1} output tok/s"));
                let place = place + output.index;
                outputs[place] = Some(output);
            }
        }
        bar.finish_and_clear();
        Ok(outputs.into_iter().map(|o| o.expect("every request ends once")).collect())
    }

    /// Answers conversations, all together, in the order given.
    pub fn chat(
        &mut self,
        conversations: &[Vec<ChatMessage>],
        params: &SamplingParams,
        options: &RenderOptions<'_>,
    ) -> Result<Vec<RequestOutput>, LlmError> {
        let request = |(index, messages): (usize, &Vec<ChatMessage>)| {
            let ids = self.engine.encode_chat(messages, options);
            let ids = ids.map_err(|source| LlmError::Request { index, source })?;
            Ok(Request::new(ids, params.clone()))
        };
        let requests = conversations.iter().enumerate().map(request);
        let requests = requests.collect::<Result<_, LlmError>>()?;
        self.generate(requests)
    }

    fn progress_bar(&self, len: usize) -> ProgressBar {
        if !self.progress {
            return ProgressBar::hidden();
        }
        let template = "{bar:30} {pos}/{len} requests [{elapsed}<{eta}] {msg}";
        let style = ProgressStyle::with_template(template).expect("a valid template");
        ProgressBar::new(len as u64).with_style(style)
    }
}
