//! Sums between the devices that share a model.
//!
//! One device is all there is today. This is the place where a model that is spread over several
//! would meet; ARCHITECTURE.md says how its weights would be cut.

use super::driver::Stream;
use super::error::CudaError;
use quire_kernels_ptx::DevicePtr;

/// The ranks that share a model, each with its own device.
pub(super) trait Communicator: Send {
    /// Which rank this is. Rank 0 adds the residual stream and the bias to its part of a sum.
    fn rank(&self) -> usize;

    /// Replaces `data[len]` by its sum over all ranks, in the order of `stream`.
    fn all_reduce_sum(
        &self,
        stream: &Stream,
        data: DevicePtr<f32>,
        len: usize,
    ) -> Result<(), CudaError>;
}

/// A model on one device: a sum of one part.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SingleRank;

impl Communicator for SingleRank {
    fn rank(&self) -> usize {
        0
    }

    fn all_reduce_sum(&self, _: &Stream, _: DevicePtr<f32>, _: usize) -> Result<(), CudaError> {
        Ok(())
    }
}
