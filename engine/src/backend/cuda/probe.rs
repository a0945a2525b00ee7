//! Times by the device's clock, for benchmarks.

use super::CudaBackend;
use super::driver::Event;
use super::element::Compute;
use super::error::CudaError;

/// Which way bytes are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyKind {
    /// From page-locked host memory.
    ToDevice,
    /// To page-locked host memory.
    ToHost,
    /// Within the device.
    OnDevice,
}

impl<T: Compute> CudaBackend<T> {
    /// Milliseconds that the device takes for what `work` launches.
    ///
    /// # Errors
    /// The device failed.
    pub fn time_ms(&mut self, work: impl FnOnce(&mut Self)) -> Result<f64, CudaError> {
        let context = self.launcher.context();
        let (start, end) = (context.timer()?, context.timer()?);
        self.launcher.stream().record(&start)?;
        work(self);
        self.launcher.take_failure()?;
        self.launcher.stream().record(&end)?;
        elapsed(&start, &end)
    }

    /// Milliseconds that a copy of `bytes` takes.
    ///
    /// # Errors
    /// The device failed, or there is no memory for that much.
    pub fn time_copy_ms(&mut self, kind: CopyKind, bytes: usize) -> Result<f64, CudaError> {
        let (context, what) = (self.launcher.context(), "a copy to be timed");
        let (start, end) = (context.timer()?, context.timer()?);
        let device = context.alloc(bytes, what)?;
        let other = context.alloc(if kind == CopyKind::OnDevice { bytes } else { 0 }, what)?;
        let host_bytes = if kind == CopyKind::OnDevice { 0 } else { bytes };
        let mut host = context.alloc_pinned(host_bytes, what)?;
        let stream = self.launcher.stream();
        stream.zero(&device, 0..bytes)?;
        stream.record(&start)?;
        match kind {
            CopyKind::ToDevice => stream.upload(&mut host, 0..bytes, &device, 0)?,
            CopyKind::ToHost => stream.download(&device, 0..bytes, &mut host, 0)?,
            CopyKind::OnDevice => stream.copy(&device, 0..bytes, &other, 0)?,
        }
        stream.record(&end)?;
        elapsed(&start, &end)
    }
}

/// Waits for the later event.
fn elapsed(start: &Event, end: &Event) -> Result<f64, CudaError> {
    end.synchronize()?;
    Ok(start.elapsed_ms(end)?.into())
}
