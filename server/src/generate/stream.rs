//! Prompts of the command line, their text printed as it comes.
//!
//! All prompts run together; the first unfinished one is shown live, the others wait in memory.

use super::summary::Tally;
use crate::interrupt;
use crate::output::{Output, chain, one_line};
use anyhow::Context;
use quire_engine::{Engine, FinishReason, Request, RequestId};
use std::collections::HashMap;

#[derive(Default)]
struct Shown {
    /// Text not yet printed.
    pending: String,
    ended: bool,
}

struct Stream {
    output: Output,
    prompts: Vec<Shown>,
    /// The one being printed.
    current: usize,
    /// Its heading is printed.
    headed: bool,
}

/// Runs `requests`, prints their text on `output`, and counts them.
///
/// # Errors
/// The output cannot be written, or a step failed.
pub fn stream(
    engine: &mut Engine,
    requests: Vec<Request>,
    output: Output,
) -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    let mut places: HashMap<RequestId, usize> = HashMap::new();
    let mut stream = Stream { output, prompts: Vec::new(), current: 0, headed: false };
    for (place, mut request) in requests.into_iter().enumerate() {
        request.stream = true;
        stream.prompts.push(Shown::default());
        match engine.add_request(request) {
            Ok(id) => drop(places.insert(id, place)),
            Err(error) => {
                tally.failed += 1;
                stream.prompts[place].ended = true;
                report_failed(place, &chain(&error.into()));
            }
        }
    }
    while engine.num_unfinished() > 0 && !interrupt::requested() {
        let step = engine.step().context("the engine failed")?;
        for delta in step.deltas {
            stream.prompts[places[&delta.request_id]].pending.push_str(&delta.text);
        }
        for output in step.finished {
            let place = places.remove(&output.request_id).expect("every request ends once");
            stream.prompts[place].ended = true;
            if let FinishReason::Error(message) = &output.finish_reason {
                tally.failed += 1;
                report_failed(place, message);
            } else {
                tally.finished(&output);
            }
        }
        stream.print()?;
    }
    for id in places.into_keys() {
        tally.aborted(&engine.abort(id).expect("unfinished requests are the engine's"));
    }
    stream.end_line()?;
    Ok(tally)
}

fn report_failed(place: usize, message: &str) {
    crate::report(&format!("error: prompt {}: {}", place + 1, one_line(message)));
}

impl Stream {
    /// Prints what there is of the current prompt and, while it has ended, goes on to the next.
    fn print(&mut self) -> anyhow::Result<()> {
        while self.current < self.prompts.len() {
            let text = std::mem::take(&mut self.prompts[self.current].pending);
            if !self.headed && !text.is_empty() {
                self.headed = true;
                if self.prompts.len() > 1 {
                    self.output.text(&format!("==> prompt {} <==\n", self.current + 1))?;
                }
            }
            if !text.is_empty() {
                self.output.text(&text)?;
            }
            if !self.prompts[self.current].ended {
                break;
            }
            self.end_line()?;
            self.current += 1;
        }
        Ok(())
    }

    /// Ends the line that a prompt's text is on.
    fn end_line(&mut self) -> anyhow::Result<()> {
        if std::mem::take(&mut self.headed) {
            self.output.text("\n")?;
        }
        Ok(())
    }
}
