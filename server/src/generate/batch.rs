//! Batches: requests in, result lines out in the same order, in bounded memory.
//!
//! ```text
//!   source ─▶ slots: [done][running][done][running]…  ─▶ output, once the first slot is done
//!                      └── in the engine ──┘
//! ```
//!
//! A bad line becomes a result line with an error, and the run goes on. Whatever ends the run
//! early, results that are there are written, in order, without the unfinished ones between.

use super::progress::Progress;
use super::request_line::{LineInput, LineRequest};
use super::source::{Entry, Next, Source};
use super::summary::{Kept, Tally};
use crate::cli::Format;
use crate::conversation::{answer_request, refusal};
use crate::interrupt;
use crate::output::{Output, OutputError, chain};
use crate::result_line::{error_line, error_text, result_line, result_text};
use anyhow::Context;
use quire_engine::metrics::LoadLog;
use quire_engine::{Engine, FinishReason, Request, RequestError, RequestId, RequestOutput};
use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::time::Instant;

/// Requests in the engine, as a multiple of those a step takes: enough that none waits for input.
const QUEUE_FACTOR: usize = 4;
/// Slots, as a multiple of those a step takes: bounds the results that wait behind a slow one.
const SLOT_FACTOR: usize = 64;
/// Errors shown on standard error; results hold all of them.
const MAX_SHOWN_ERRORS: u64 = 10;

struct Slot {
    line: u64,
    end: u64,
    id: Value,
    /// One result a sequence, once there is one; an error is the only one.
    results: Vec<Option<String>>,
}

impl Slot {
    fn is_done(&self) -> bool {
        self.results.iter().all(Option::is_some)
    }
}

/// How a batch is run.
#[derive(Clone, Copy, Default)]
pub struct BatchOptions {
    /// Ends the run at the first request that is bad or fails.
    pub fail_fast: bool,
    /// Most tokens of an answer to messages, where the line does not say.
    pub answer_tokens: Option<usize>,
    /// What an earlier run has left.
    pub kept: Kept,
    /// Prints a line about the load on standard error every ten seconds.
    pub log_load: bool,
    /// A later run may go on with the results: what the loss of a device ends is left to it.
    pub resumable: bool,
}

/// A batch under way.
pub struct Batch<'a> {
    engine: &'a mut Engine,
    source: Source,
    /// How errors name the source.
    source_name: String,
    output: Output,
    format: Format,
    progress: Progress,
    options: BatchOptions,
    slots: VecDeque<Slot>,
    /// Number of the first slot, counted from the start of the run.
    first_slot: u64,
    /// Number of each running request's slot.
    running: HashMap<RequestId, u64>,
    source_ended: bool,
    tally: Tally,
    log: LoadLog,
}

impl<'a> Batch<'a> {
    /// A batch that has not started; `engine` is idle.
    pub fn new(
        engine: &'a mut Engine,
        source: Source,
        source_name: String,
        (output, format): (Output, Format),
        progress: Progress,
        options: BatchOptions,
    ) -> Self {
        Batch {
            log: LoadLog::new(Instant::now(), engine.stats()),
            engine,
            source,
            source_name,
            output,
            format,
            progress,
            options,
            slots: VecDeque::new(),
            first_slot: 0,
            running: HashMap::new(),
            source_ended: false,
            tally: Tally::after(options.kept),
        }
    }

    /// Runs to the end, to Ctrl-C, to the loss of the device or, with `fail_fast`, to the first
    /// failure.
    ///
    /// # Errors
    /// The input cannot be read, the output not be written, or a step failed that the device
    /// survived; results that were there are written.
    pub fn run(mut self) -> anyhow::Result<Tally> {
        let end = self.run_steps();
        for (id, _) in std::mem::take(&mut self.running) {
            self.engine.abort(id).iter().for_each(|output| self.tally.aborted(output));
        }
        let unwritable = end.as_ref().is_err_and(|e| e.is::<OutputError>());
        if !unwritable {
            while let Some(slot) = self.next_slot() {
                self.write(slot)?;
            }
        }
        self.progress.finish();
        self.tally.stopped = self.options.fail_fast && self.tally.failed > 0;
        end.map(|()| self.tally)
    }

    fn run_steps(&mut self) -> anyhow::Result<()> {
        let mut failure = None;
        while !interrupt::requested() {
            if let Err(error) = self.fill() {
                // What is running still ends well.
                failure = Some(error);
                self.source_ended = true;
            }
            self.write_ready()?;
            if self.running.is_empty() && self.source_ended {
                break;
            }
            let step = match self.engine.step() {
                Ok(step) => step,
                Err(error) => {
                    self.tally.step_failed(error, &self.progress)?;
                    self.source_ended |= self.tally.lost;
                    continue;
                }
            };
            self.tally.failed_steps = 0;
            for output in step.finished {
                // As after Ctrl-C.
                let with_device = self.options.resumable
                    && self.tally.lost
                    && matches!(output.finish_reason, FinishReason::Error(_))
                    && self.running.remove(&output.request_id).is_some();
                // One that ended in the step in which an earlier one failed is cut off too.
                if !with_device && self.running.contains_key(&output.request_id) {
                    self.take(&output)?;
                } else {
                    self.tally.aborted(&output);
                }
            }
            self.write_ready()?;
            if self.options.log_load
                && let Some(line) = self.log.line(Instant::now(), || self.engine.load())
            {
                self.progress.report(&line);
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Gives the engine requests while there are some and there is room.
    fn fill(&mut self) -> anyhow::Result<()> {
        let seats = self.engine.limits().max_num_seqs;
        while !self.source_ended
            && self.running.len() < QUEUE_FACTOR * seats
            && self.slots.len() < SLOT_FACTOR * seats
        {
            let next = self.source.next(self.running.is_empty());
            match next.with_context(|| format!("cannot read {}", self.source_name))? {
                Next::Entry(entry) => self.add(*entry),
                Next::Later => break,
                Next::End => self.source_ended = true,
            }
        }
        Ok(())
    }

    fn add(&mut self, entry: Entry) {
        let Entry { line, end, request } = entry;
        let mut slot = Slot { line, end, id: request.id, results: Vec::new() };
        let number = self.first_slot + self.slots.len() as u64;
        let added = request.request.and_then(|request| {
            let n = request.params.n;
            let id = self.submit(request).map_err(|e| chain(&refusal(e)))?;
            // Not before the engine has checked it.
            slot.results.resize(n, None);
            Ok(id)
        });
        match added {
            Ok(id) => drop(self.running.insert(id, number)),
            Err(message) => {
                slot.results = vec![Some(self.failed(&slot.id, line, &message))];
                self.stop_behind(number);
            }
        }
        self.slots.push_back(slot);
    }

    fn submit(&mut self, request: LineRequest) -> Result<RequestId, RequestError> {
        let LineRequest { input, params } = request;
        let request = match input {
            LineInput::Prompt(prompt) => Request::new(prompt, params),
            LineInput::Chat(conversation) => {
                let prompt = conversation.encode(self.engine)?;
                answer_request(self.engine, prompt, params, self.options.answer_tokens)
            }
        };
        self.engine.add_request(request)
    }

    /// Counts and shows an error and makes its result line.
    fn failed(&mut self, id: &Value, line: u64, message: &str) -> String {
        self.tally.failed += 1;
        let shown = crate::output::one_line(message);
        if self.tally.lost {
            // It is one error for all of them, and shown.
        } else if self.tally.failed <= MAX_SHOWN_ERRORS {
            self.progress.report(&format!("error: {}:{line}: {shown}", self.source_name));
        } else if self.tally.failed == MAX_SHOWN_ERRORS + 1 {
            self.progress.report("note: further errors are in the results only");
        }
        match self.format {
            Format::Jsonl => error_line(id, &shown, line),
            Format::Text => error_text(id, &shown, line),
        }
    }

    /// With `fail_fast`, what comes after slot `failed` is cut off; what is before it is finished,
    /// so that the results have no gap.
    fn stop_behind(&mut self, failed: u64) {
        if !self.options.fail_fast {
            return;
        }
        self.source_ended = true;
        let behind = |(id, slot): (&RequestId, &u64)| (*slot > failed).then_some(*id);
        let behind: Vec<RequestId> = self.running.iter().filter_map(behind).collect();
        for id in behind {
            self.running.remove(&id);
            self.engine.abort(id).iter().for_each(|output| self.tally.aborted(output));
        }
    }

    /// Makes the result line of a request that ended.
    fn take(&mut self, output: &RequestOutput) -> anyhow::Result<()> {
        let slot = self.running[&output.request_id];
        let at = usize::try_from(slot - self.first_slot).expect("fewer slots than memory");
        let (id, line) = (self.slots[at].id.clone(), self.slots[at].line);
        let done = if let FinishReason::Error(message) = &output.finish_reason {
            self.stop_behind(slot);
            self.failed(&id, line, message)
        } else {
            self.tally.finished(output);
            match self.format {
                Format::Jsonl => result_line(&id, line, output, &self.engine.text().tokenizer)?,
                Format::Text => result_text(&id, line, output),
            }
        };
        let slot = &mut self.slots[at];
        slot.results[output.index] = Some(done);
        if slot.is_done() {
            self.running.remove(&output.request_id);
        }
        Ok(())
    }

    fn next_slot(&mut self) -> Option<Slot> {
        let slot = self.slots.pop_front()?;
        self.first_slot += 1;
        Some(slot)
    }

    /// Writes the results whose turn it is.
    fn write_ready(&mut self) -> Result<(), OutputError> {
        while self.slots.front().is_some_and(Slot::is_done) {
            if let Some(slot) = self.next_slot() {
                self.write(slot)?;
            }
        }
        let done = self.tally.finished + self.tally.failed;
        self.progress.update(done, self.engine.stats().num_generated_tokens);
        Ok(())
    }

    /// Writes a slot's results, if it has all of them.
    fn write(&mut self, slot: Slot) -> Result<(), OutputError> {
        if !slot.is_done() {
            return Ok(());
        }
        for line in slot.results.into_iter().flatten() {
            self.output.text(&(line + "\n"))?;
        }
        self.progress.advance(slot.end);
        Ok(())
    }
}
