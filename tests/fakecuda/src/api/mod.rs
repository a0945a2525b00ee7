//! The functions that the library exports, by the driver's names and types.
//!
//! Each takes the lock, looks up what its handles mean, checks its arguments, and hands on. All of
//! them return 0 or a [`Code`]. None may be called from two threads on one handle that is being
//! destroyed; apart from that, any thread may call any of them.
//!
//! What is not here is not in the driver: a program that asks for it finds no symbol.

mod control;
mod cublaslt;
mod device;
mod event;
mod graph;
mod launch;
mod memory;
mod stream;

pub(crate) use control::write_stats_at_exit;
pub(crate) use cublaslt::Object;

use std::ffi::c_int;

use crate::code::{Code, Result};
use crate::driver::{self, Driver};

/// A result as the driver returns it.
fn status(result: Result) -> c_int {
    result.map_or_else(|Code(code)| code, |()| 0)
}

/// A call that needs no context.
fn with_driver(call: impl FnOnce(&mut Driver) -> Result) -> c_int {
    status(call(&mut driver::lock()))
}

/// A call that needs a usable context. It gets the device of the current one.
fn with_device(call: impl FnOnce(&mut Driver, usize) -> Result) -> c_int {
    with_driver(|driver| {
        let device = driver.usable_device()?;
        call(driver, device)
    })
}

/// A call that gives something back. In a lost context it says so, but is done.
fn give_back(call: impl FnOnce(&mut Driver, usize) -> Result) -> c_int {
    with_driver(|driver| {
        let device = driver.current_device()?;
        let done = call(driver, device);
        driver.devices[device].lost.map_or(done, Err)
    })
}
