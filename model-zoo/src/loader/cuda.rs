//! What is special about a device.

use super::*;
use crate::trace::{self, OpOutput};
use half::bf16;
use quire_engine::backend::cuda::{CudaDevice, check_sizes};
use quire_engine::backend::{CudaBackend, CudaBuffers};

/// Share of the device's memory that is filled unless the user says otherwise.
const UTILIZATION: f32 = 0.9;
/// Tokens in a step unless set.
const BATCHED_TOKENS: usize = 2048;

/// What a decoder takes on a device.
pub(crate) fn memory(spec: &DecoderSpec, dtype: DType, options: CudaOptions) -> DecoderMemory<'_> {
    DecoderMemory::new(spec, CudaBuffers::new(dtype, options.gemm))
}

/// The engine's limits with a device's defaults, and the device's memory.
pub(crate) fn plan(
    spec: &DecoderSpec,
    dtype: DType,
    options: &LoadOptions,
) -> Result<(EngineConfig, SystemMemory), ModelError> {
    check_sizes(dtype, spec.hidden_size, spec.intermediate_size, spec.head_dim)
        .map_err(BackendError::from)?;
    let device = CudaDevice::open(options.cuda.device).map_err(BackendError::from)?;
    let engine = options.engine.clone();
    let config = EngineConfig {
        memory_utilization: Some(engine.memory_utilization.unwrap_or(UTILIZATION)),
        max_num_batched_tokens: engine.max_num_batched_tokens.or(Some(BATCHED_TOKENS)),
        ..engine
    };
    Ok((config, device.memory))
}

/// Computes `tokens` as one step, launch by launch.
pub(crate) fn trace(
    files: &ModelFiles,
    (dtype, options): (DType, CudaOptions),
    tokens: &[u32],
) -> Result<Vec<OpOutput>, ModelError> {
    let options = CudaOptions { enforce_eager: true, ..options };
    match dtype {
        DType::F32 => trace::run(files, cuda::<f32>(options)?, tokens),
        DType::Bf16 => trace::run(files, cuda::<bf16>(options)?, tokens),
    }
}

/// A model on a device.
pub(crate) fn executor(
    files: &ModelFiles,
    (dtype, options): (DType, CudaOptions),
    config: &ResolvedConfig,
    progress: &mut dyn FnMut(u64),
) -> Result<Box<dyn Executor>, ModelError> {
    match dtype {
        DType::F32 => files.executor(cuda::<f32>(options)?, config, progress),
        DType::Bf16 => files.executor(cuda::<bf16>(options)?, config, progress),
    }
}

fn cuda<T: quire_engine::backend::cuda::Compute>(
    options: CudaOptions,
) -> Result<CudaBackend<T>, ModelError> {
    Ok(CudaBackend::new(options).map_err(BackendError::from)?)
}
