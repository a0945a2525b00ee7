//! Prompts of the command line, their text printed as it comes.
//!
//! All prompts run together; the first unfinished one is shown live, the others wait in memory.

use super::progress::Progress;
use super::summary::Tally;
use crate::interrupt;
use crate::output::{Output, chain, one_line};
use quire_engine::{Engine, FinishReason, Request, RequestId};
use std::collections::HashMap;

struct Shown {
    /// How its heading names it.
    name: String,
    /// Text not yet printed.
    pending: String,
    ended: bool,
}

struct Stream {
    output: Output,
    prompts: Vec<Shown>,
    /// Each is announced, as there may be several.
    headings: bool,
    /// The one being printed.
    current: usize,
    /// Its heading is printed.
    headed: bool,
}

/// Runs `requests`, prints their text on `output`, and counts them.
///
/// # Errors
/// The output cannot be written, or a step failed that the device survived.
pub fn stream(
    engine: &mut Engine,
    requests: Vec<Request>,
    output: Output,
) -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    // Place of each request's first sequence, and how many of them run.
    let mut places: HashMap<RequestId, (usize, usize)> = HashMap::new();
    let headings = requests.len() > 1 || requests.iter().any(|request| request.params.n > 1);
    let mut stream = Stream { output, prompts: Vec::new(), headings, current: 0, headed: false };
    for (i, mut request) in requests.into_iter().enumerate() {
        // Beams are known at the end only.
        request.stream = !request.params.use_beam_search;
        let n = request.params.n;
        match engine.add_request(request) {
            Ok(id) => {
                places.insert(id, (stream.prompts.len(), n));
                let name = |sample| match n {
                    1 => format!("prompt {}", i + 1),
                    _ => format!("prompt {}, sample {}", i + 1, sample + 1),
                };
                let shown = |name| Shown { name, pending: String::new(), ended: false };
                stream.prompts.extend((0..n).map(name).map(shown));
            }
            Err(error) => {
                tally.failed += 1;
                report_failed(&format!("prompt {}", i + 1), &chain(&error.into()));
            }
        }
    }
    while engine.num_unfinished() > 0 && !interrupt::requested() {
        let step = match engine.step() {
            Ok(step) => step,
            Err(error) => {
                tally.step_failed(error, &Progress::hidden())?;
                continue;
            }
        };
        tally.failed_steps = 0;
        for delta in step.deltas {
            let place = places[&delta.request_id].0 + delta.index;
            stream.prompts[place].pending.push_str(&delta.text);
        }
        for output in step.finished {
            let entry = places.get_mut(&output.request_id).expect("a request of this run");
            let shown = &mut stream.prompts[entry.0 + output.index];
            shown.ended = true;
            if output.beam.is_some() {
                shown.pending.push_str(&output.text);
            }
            entry.1 -= 1;
            if entry.1 == 0 {
                places.remove(&output.request_id);
            }
            if let FinishReason::Error(message) = &output.finish_reason {
                tally.failed += 1;
                // The loss of a device is one error for all of them, and shown.
                if !tally.lost {
                    report_failed(&shown.name, message);
                }
            } else {
                tally.finished(&output);
            }
        }
        stream.print()?;
    }
    for id in places.into_keys() {
        engine.abort(id).iter().for_each(|output| tally.aborted(output));
    }
    // What ended behind a prompt that was cut off is shown too.
    stream.prompts.iter_mut().for_each(|shown| shown.ended = true);
    stream.print()?;
    Ok(tally)
}

fn report_failed(name: &str, message: &str) {
    crate::report(&format!("error: {name}: {}", one_line(message)));
}

impl Stream {
    /// Prints what there is of the current prompt and, while it has ended, goes on to the next.
    fn print(&mut self) -> anyhow::Result<()> {
        while self.current < self.prompts.len() {
            let text = std::mem::take(&mut self.prompts[self.current].pending);
            if !self.headed && !text.is_empty() {
                self.headed = true;
                if self.headings {
                    let heading = format!("==> {} <==\n", self.prompts[self.current].name);
                    self.output.text(&heading)?;
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
