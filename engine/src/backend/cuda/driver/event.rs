//! Marks in the work of a stream.

use cudarc::driver::sys::{CUevent, CUevent_flags, CUevent_st};

use super::Handle;
use super::context::Context;
use crate::backend::cuda::error::CudaError;

/// A mark that a stream sets when it gets there. Until it is recorded, it counts as reached.
pub(crate) struct Event {
    context: Context,
    event: Handle<CUevent_st>,
}

impl Context {
    /// An event that tells no time, which is the cheaper one.
    pub(crate) fn event(&self) -> Result<Event, CudaError> {
        Event::new(self, CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// An event for [`Event::elapsed_ms`].
    pub(crate) fn timer(&self) -> Result<Event, CudaError> {
        Event::new(self, CUevent_flags::CU_EVENT_DEFAULT)
    }
}

impl Event {
    fn new(context: &Context, flags: CUevent_flags) -> Result<Self, CudaError> {
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: the flags are the driver's.
        unsafe { context.driver()?.cuEventCreate(&mut event, flags as u32) }?;
        Ok(Event { context: context.clone(), event: Handle(event) })
    }

    /// Waits until it is reached.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the event lives as long as `self`.
        unsafe { self.context.driver()?.cuEventSynchronize(self.event.0) }
    }

    /// Milliseconds on the device from this event to `until`. Both are timers and are reached.
    pub(crate) fn elapsed_ms(&self, until: &Event) -> Result<f32, CudaError> {
        let mut ms = 0.0;
        // SAFETY: both events live as long as the references.
        unsafe { self.context.driver()?.cuEventElapsedTime(&mut ms, self.event.0, until.event.0) }?;
        Ok(ms)
    }

    pub(super) fn handle(&self) -> CUevent {
        self.event.0
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Ok(driver) = self.context.driver() else { return };
        // SAFETY: created by `new`, destroyed here alone; the driver keeps it until it is reached.
        let _ = unsafe { driver.cuEventDestroy_v2(self.event.0) };
    }
}
