//! The remote control of tests, and the counts that a program leaves behind.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::OnceLock;

use crate::control::{Reply, Request};
use crate::driver::{self, Driver};

/// Carries out a request, JSON of [`Request`], and returns JSON of [`Reply`], to be given back to
/// [`fakecuda_free`].
///
/// # Safety
/// `request` points to text that ends with a NUL.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakecuda_control(request: *const c_char) -> *mut c_char {
    // SAFETY: the caller's promise.
    let request = unsafe { CStr::from_ptr(request) }.to_bytes();
    let request = serde_json::from_slice(request).expect("a request of the same version");
    let reply = carry_out(&mut driver::lock(), request);
    let reply = serde_json::to_vec(&reply).expect("a reply is plain data");
    CString::new(reply).expect("JSON has no NUL").into_raw()
}

/// # Safety
/// `reply` is what [`fakecuda_control`] has returned, once.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakecuda_free(reply: *mut c_char) {
    // SAFETY: the caller's promise.
    drop(unsafe { CString::from_raw(reply) });
}

fn carry_out(driver: &mut Driver, request: Request) -> Reply {
    match request {
        Request::Reset(config) => driver.reset(config),
        Request::Fail(failure) => driver.failures.add(failure),
        Request::Stats => return Reply::Stats(driver.stats()),
        Request::LogLaunches(on) => driver.log = on.then(Vec::new),
        Request::TakeLaunches => {
            let log = driver.log.as_mut();
            return Reply::Launches(log.map(std::mem::take).unwrap_or_default());
        }
    }
    Reply::Done
}

static STATS_PATH: OnceLock<PathBuf> = OnceLock::new();

unsafe extern "C" {
    /// Of the C library.
    fn atexit(function: extern "C" fn()) -> c_int;
}

/// Writes the counts to a file, as JSON, when the process exits.
pub(crate) fn write_stats_at_exit(path: PathBuf) {
    if STATS_PATH.set(path).is_ok() {
        // SAFETY: the library is never unloaded (see build.rs), and the function does not unwind.
        let status = unsafe { atexit(write_stats) };
        assert_eq!(status, 0, "the C library has no room for a function at exit");
    }
}

extern "C" fn write_stats() {
    let Some(path) = STATS_PATH.get() else { return };
    let stats = driver::lock().stats();
    let written = serde_json::to_vec_pretty(&stats)
        .map_err(|error| error.to_string())
        .and_then(|json| std::fs::write(path, json).map_err(|error| error.to_string()));
    if let Err(error) = written {
        eprintln!("fakecuda: {}: {error}", path.display());
    }
}
