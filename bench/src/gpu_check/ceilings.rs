//! What the machine could give: how fast memory is copied, and matrices are multiplied.

use super::kit::{Device, Kit};
use super::report::Figure;
use super::{EAGER, Run};
use quire_engine::backend::cuda::CopyKind;
use quire_engine::backend::{CudaOptions, GemmMode};
use serde_json::json;

/// The best of so many counts.
const ROUNDS: usize = 3;
/// Most bytes of a copy to or from the host, whose page-locked memory takes long to get.
const MOST_HOST_BYTES: usize = 1 << 28;

/// What the machine could give.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ceilings {
    /// Bytes a second that a copy within the device reads and writes together.
    pub bytes_per_s: f64,
    /// Operations a second of a large product of bf16 matrices.
    pub flops_per_s: f64,
}

/// Names of them.
pub(super) const COPY: &str = "copy bandwidth";
pub(super) const PEAK: &str = "matrix peak";
pub(super) const ROOFLINE: &str = "copy bandwidth or matrix peak";

impl Ceilings {
    /// Seconds that this takes at least.
    pub fn seconds(&self, bytes: f64, flops: f64) -> f64 {
        (bytes / self.bytes_per_s).max(flops / self.flops_per_s)
    }
}

/// cuBLASLt instead of Quire's own products.
pub(super) const CUBLAS: CudaOptions = CudaOptions { gemm: GemmMode::Cublas, ..EAGER };

pub(super) fn measure(run: &mut Run) -> anyhow::Result<Ceilings> {
    let mut kit = Kit::new(EAGER, run.sizes, run.dry_run)?;
    let on_device = copies(run, &mut kit.device, CopyKind::OnDevice)?;
    copies(run, &mut kit.device, CopyKind::ToDevice)?;
    copies(run, &mut kit.device, CopyKind::ToHost)?;
    let mut flops_per_s = product(run, &mut kit, "Triton")?;
    drop(kit);
    match Kit::new(CUBLAS, run.sizes, run.dry_run) {
        Ok(mut kit) => flops_per_s = flops_per_s.max(product(run, &mut kit, "cuBLASLt")?),
        Err(error) => run.leave_out("cuBLASLt", &format!("{error:#}")),
    }
    Ok(Ceilings { bytes_per_s: on_device, flops_per_s })
}

/// Bytes a second of copies, the best of all sizes.
fn copies(run: &mut Run, device: &mut Device, kind: CopyKind) -> anyhow::Result<f64> {
    let (name, moved) = match kind {
        CopyKind::OnDevice => ("copy within the device", 2.0),
        CopyKind::ToDevice => ("copy to the device", 1.0),
        CopyKind::ToHost => ("copy to the host", 1.0),
    };
    let mut best = 0.0f64;
    for &bytes in run.sizes.copies {
        if kind != CopyKind::OnDevice && bytes > MOST_HOST_BYTES {
            continue;
        }
        let mut ms = f64::INFINITY;
        for _ in 0..ROUNDS {
            ms = ms.min(device.time_copy_ms(kind, bytes)?);
        }
        let rate = moved * bytes as f64 / ms / 1e6;
        best = best.max(rate);
        run.figure(Figure::new(name, "GB/s", json!({"bytes": bytes})).ms(ms).value(rate));
    }
    Ok(best * 1e9)
}

/// Operations a second of a large product.
fn product(run: &mut Run, kit: &mut Kit, by: &'static str) -> anyhow::Result<f64> {
    let mut ms = f64::INFINITY;
    for _ in 0..=ROUNDS {
        ms = ms.min(kit.time_long()?);
    }
    let flops = 2.0 * (run.sizes.peak as f64).powi(3);
    let figure = Figure::new("matrix product", "TFLOP/s", json!({"by": by, "n": run.sizes.peak}));
    run.figure(figure.ms(ms).value(flops / ms / 1e9));
    Ok(flops / ms * 1e3)
}
