//! A build without the CUDA backend: asking for it is an error.

use super::*;
use crate::trace::OpOutput;

/// Never asked for: [`plan`] refuses first.
pub(crate) fn memory(spec: &DecoderSpec, dtype: DType, _: CudaOptions) -> DecoderMemory<'_> {
    DecoderMemory::new(spec, CpuBuffers::new(dtype, None))
}

pub(crate) fn plan(
    _: &DecoderSpec,
    _: DType,
    _: &LoadOptions,
) -> Result<(EngineConfig, SystemMemory), ModelError> {
    Err(ModelError::NoCuda)
}

pub(crate) fn executor(
    _: &ModelFiles,
    _: (DType, CudaOptions),
    _: &ResolvedConfig,
    _: &mut dyn FnMut(u64),
) -> Result<Box<dyn Executor>, ModelError> {
    Err(ModelError::NoCuda)
}

pub(crate) fn trace(
    _: &ModelFiles,
    _: (DType, CudaOptions),
    _: &[u32],
) -> Result<Vec<OpOutput>, ModelError> {
    Err(ModelError::NoCuda)
}
