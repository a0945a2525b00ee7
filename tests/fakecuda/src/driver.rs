//! The state of the driver: handles of all kinds, and what they stand for.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard};

use quire_ptxsim::Memory;

use crate::api::Object;
use crate::capture::{Capture, Graph};
use crate::code::{self, Code, Result};
use crate::config::{Call, Config};
use crate::host::Pinned;
use crate::module::{LoadedFunction, LoadedModule};
use crate::stats::{Failures, LaunchRecord, Stats};
use crate::stream::{Event, Stream};
use crate::work::Work;

thread_local! {
    /// The context that is current on this thread, or 0.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

static DRIVER: Mutex<Option<Driver>> = Mutex::new(None);

/// The one driver, made as the environment says when it is first asked for.
pub(crate) fn lock() -> DriverGuard {
    // A panic ends the process: no call of this library unwinds.
    let mut driver = DRIVER.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if driver.is_none() {
        *driver = Some(Driver::from_environment());
    }
    DriverGuard(driver)
}

/// Access to the driver.
pub(crate) struct DriverGuard(MutexGuard<'static, Option<Driver>>);

impl std::ops::Deref for DriverGuard {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        self.0.as_ref().expect("made by lock")
    }
}

impl std::ops::DerefMut for DriverGuard {
    fn deref_mut(&mut self) -> &mut Driver {
        self.0.as_mut().expect("made by lock")
    }
}

/// A device and its primary context.
#[derive(Debug, Default)]
pub(crate) struct Device {
    /// Handle of the context while it is retained, else 0.
    pub context: u64,
    pub retained: u32,
    /// Handle of the default stream of the context.
    pub default_stream: u64,
    /// The error that every further call returns.
    pub lost: Option<Code>,
    /// Bytes of memory in use.
    pub used: usize,
}

/// An allocation of device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocation {
    pub device: usize,
    pub bytes: usize,
    /// A piece of work will give it back.
    pub freeing: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Driver {
    pub config: Config,
    pub initialised: bool,
    pub devices: Vec<Device>,
    pub memory: Memory,
    pub allocations: BTreeMap<u64, Allocation>,
    pub pinned: BTreeMap<usize, Pinned>,
    pub streams: HashMap<u64, Stream>,
    pub events: HashMap<u64, Event>,
    pub modules: HashMap<u64, LoadedModule>,
    pub functions: HashMap<u64, LoadedFunction>,
    pub captures: HashMap<u64, Capture>,
    pub graphs: HashMap<u64, Graph>,
    pub executables: HashMap<u64, Graph>,
    /// Objects of cuBLASLt.
    pub blas: HashMap<u64, Object>,
    pub stats: Stats,
    pub failures: Failures,
    /// Kernels that have run, while they are wanted.
    pub log: Option<Vec<LaunchRecord>>,
    /// The time, in microseconds: each piece of work takes one.
    pub clock: u64,
    last_handle: u64,
}

impl Driver {
    fn from_environment() -> Driver {
        let variable = |name: &str| std::env::var(name).ok();
        let (config, failures) = Config::from_variables(variable).unwrap_or_else(|error| {
            eprintln!("fakecuda: {error}");
            std::process::abort();
        });
        let mut driver = Driver::default();
        driver.reset(config);
        failures.into_iter().for_each(|failure| driver.failures.add(failure));
        if let Some(path) = std::env::var_os("FAKECUDA_STATS") {
            crate::api::write_stats_at_exit(path.into());
        }
        driver
    }

    /// A new machine. Handles of the old one are unknown to it and never reused.
    pub fn reset(&mut self, config: Config) {
        let devices = (0..config.num_devices).map(|_| Device::default()).collect();
        let last_handle = self.last_handle;
        *self = Driver { config, devices, last_handle, ..Driver::default() };
        for device in 0..self.devices.len() {
            self.devices[device].default_stream = self.add_stream(device, true);
        }
    }

    /// A handle that was never used. Small numbers are special streams.
    pub fn new_handle(&mut self) -> u64 {
        self.last_handle = self.last_handle.max(0xcd_0000) + 16;
        self.last_handle
    }

    pub fn set_current(&mut self, context: u64) -> Result {
        if context != 0 && self.device_of(context).is_none() {
            return Err(code::INVALID_CONTEXT);
        }
        CURRENT.set(context);
        Ok(())
    }

    /// The context that is current on this thread, or 0.
    pub fn current_context(&self) -> u64 {
        CURRENT.get()
    }

    fn device_of(&self, context: u64) -> Option<usize> {
        self.devices.iter().position(|device| context != 0 && device.context == context)
    }

    /// The device whose context is current, whatever its state.
    pub fn current_device(&self) -> Result<usize> {
        if !self.initialised {
            return Err(code::NOT_INITIALIZED);
        }
        self.device_of(CURRENT.get()).ok_or(code::INVALID_CONTEXT)
    }

    /// The device whose context is current and can be used.
    pub fn usable_device(&self) -> Result<usize> {
        let device = self.current_device()?;
        self.devices[device].lost.map_or(Ok(device), Err)
    }

    /// Counts a call that can be made to fail, and fails where that was asked for.
    pub fn inject(&mut self, call: Call, device: usize) -> Result {
        self.failures.check(call).inspect_err(|&code| {
            self.stats.failures += 1;
            if code.is_sticky() {
                self.lose(device, code);
            }
        })
    }

    /// The context of a device is unusable from now on; what its streams hold is dropped, and so
    /// are its captures.
    pub fn lose(&mut self, device: usize, code: Code) {
        self.devices[device].lost.get_or_insert(code);
        self.captures.retain(|_, capture| capture.device != device);
        self.streams.values_mut().filter(|s| s.device == device).for_each(|s| s.capture = None);
        let streams = self.streams.values_mut().filter(|stream| stream.device == device);
        let dropped: Vec<Work> = streams.flat_map(|stream| stream.queue.drain(..)).collect();
        for work in dropped {
            // The program did its part: this is no leak.
            if let Work::Free { at } = work {
                self.give_back(at);
            }
        }
    }

    /// The device with that ordinal.
    pub fn device(&self, ordinal: i32) -> Result<usize> {
        if !self.initialised {
            return Err(code::NOT_INITIALIZED);
        }
        let ordinal = usize::try_from(ordinal).ok();
        ordinal.filter(|&ordinal| ordinal < self.devices.len()).ok_or(code::INVALID_DEVICE)
    }

    pub fn retain(&mut self, device: usize) -> Result<u64> {
        if let Some(code) = self.devices[device].lost {
            return Err(code);
        }
        if self.devices[device].retained == 0 {
            self.devices[device].context = self.new_handle();
        }
        self.devices[device].retained += 1;
        Ok(self.devices[device].context)
    }

    /// What is alive when the last one lets go of a context stays counted, so that a leak shows.
    pub fn release(&mut self, device: usize) -> Result {
        let retained = self.devices[device].retained;
        self.devices[device].retained = retained.checked_sub(1).ok_or(code::INVALID_CONTEXT)?;
        if retained == 1 {
            self.run_all(device);
            self.devices[device].context = 0;
        }
        self.devices[device].lost.map_or(Ok(()), Err)
    }

    /// The counts, with what is alive now.
    pub fn stats(&self) -> Stats {
        let live_streams = self.streams.values().filter(|stream| !stream.destroyed).count();
        Stats {
            live_allocations: self.allocations.values().filter(|found| !found.freeing).count()
                as u64,
            live_pinned: self.pinned.len() as u64,
            live_pinned_bytes: self.pinned.values().map(|found| found.bytes() as u64).sum(),
            live_streams: (live_streams - self.devices.len()) as u64,
            live_events: self.events.len() as u64,
            live_modules: self.modules.len() as u64,
            live_graphs: (self.graphs.len() + self.executables.len()) as u64,
            live_blas: self.blas.len() as u64,
            ..self.stats
        }
    }
}
