//! Ctrl-C: the first one ends a run in good order where there is something to keep, the second
//! one, or the first while nothing has been produced, ends the process at once.

use crate::INTERRUPTED;
use anyhow::Context;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

static CAUGHT: AtomicBool = AtomicBool::new(false);
static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Sets the handler; once per process.
pub fn install() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        let again = REQUESTED.swap(true, SeqCst);
        if again || !CAUGHT.load(SeqCst) {
            crate::report("error: interrupted");
            std::process::exit(INTERRUPTED.into());
        }
    })
    .context("cannot handle Ctrl-C")
}

/// From here on whoever runs asks [`requested`] and ends in good order.
pub fn catch() {
    CAUGHT.store(true, SeqCst);
}

/// Back to before [`catch`]: what was to be ended has. Says whether Ctrl-C was pressed.
pub fn release() -> bool {
    CAUGHT.store(false, SeqCst);
    REQUESTED.swap(false, SeqCst)
}

/// Ctrl-C was pressed.
pub fn requested() -> bool {
    REQUESTED.load(SeqCst)
}
