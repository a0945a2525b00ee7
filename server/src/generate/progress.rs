//! The progress line of a batch: requests done, tokens per second, and, where the input's length
//! is known, how far it is. Drawn on standard error when that is a terminal.

use crate::load::style;
use indicatif::ProgressBar;

/// A progress line.
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Over an input of `total` bytes, where that is known.
    pub fn new(total: Option<u64>) -> Self {
        let bar = match total {
            Some(total) => ProgressBar::new(total)
                .with_style(style("{bar:30} {percent}% [{elapsed}<{eta}] {msg}")),
            None => ProgressBar::no_length().with_style(style("{spinner} [{elapsed}] {msg}")),
        };
        Progress { bar }
    }

    /// Draws nothing.
    pub fn hidden() -> Self {
        Progress { bar: ProgressBar::hidden() }
    }

    /// An earlier run has dealt with the input's first `end` bytes.
    pub fn skip(&self, end: u64) {
        self.bar.set_position(end);
        self.bar.reset_eta();
    }

    /// Results are written for the input's first `end` bytes.
    pub fn advance(&self, end: u64) {
        self.bar.set_position(end);
    }

    /// So many requests have ended, with so many tokens.
    pub fn update(&self, requests: u64, output_tokens: u64) {
        if self.bar.is_hidden() {
            return;
        }
        let rate = output_tokens as f64 / self.bar.elapsed().as_secs_f64().max(1e-3);
        self.bar.set_message(format!("{requests} requests, {rate:.1} output tokens/s"));
    }

    /// Prints a line on standard error without disturbing the progress line.
    pub fn report(&self, line: &str) {
        self.bar.suspend(|| crate::report(line));
    }

    /// Removes the progress line.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
