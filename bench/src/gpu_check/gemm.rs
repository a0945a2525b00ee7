//! The matrix products of an 8B model, from one row to a whole prompt, against cuBLASLt and against
//! what memory and matrix units could give.

use super::ceilings::{CUBLAS, Ceilings, ROOFLINE};
use super::kit::{Device, Kit, Matrix, Tensor};
use super::report::Figure;
use super::sizes::GemmShape;
use super::{EAGER, Run};
use quire_engine::ops::{Backend, MatrixLayout, TensorKind};
use serde_json::json;

/// Most copies of a weight.
const MAX_COPIES: usize = 16;
/// Percent of the speed of cuBLASLt to be reached.
const CUBLAS_AIM: f64 = 80.0;

/// Products of all shapes and numbers of rows.
pub(super) fn run(run: &mut Run) -> anyhow::Result<()> {
    let ceilings = run.ceilings()?;
    let mut own = Kit::new(EAGER, run.sizes, run.dry_run)?;
    let mut cublas = match Kit::new(CUBLAS, run.sizes, run.dry_run) {
        Ok(kit) => Some(kit),
        Err(error) => {
            run.leave_out("cuBLASLt", &format!("{error:#}"));
            None
        }
    };
    for shape in run.sizes.gemm {
        if run.has_time_for(&format!("products of {}", shape.name)) {
            products(run, &ceilings, shape, (&mut own, cublas.as_mut()))?;
        }
    }
    Ok(())
}

/// Products of a weight of one shape.
fn products(
    run: &mut Run,
    ceilings: &Ceilings,
    shape: &GemmShape,
    (own, mut cublas): (&mut Kit, Option<&mut Kit>),
) -> anyhow::Result<()> {
    // Every product reads another copy, so that no cache holds it.
    let bytes = 2 * shape.n * shape.k;
    let copies = run.sizes.spread.div_ceil(bytes).clamp(1, MAX_COPIES);
    let layout = if shape.gated { MatrixLayout::GateUp } else { MatrixLayout::Plain };
    let weights: Vec<Matrix> =
        (0..copies).map(|_| own.matrix(layout, shape.n, shape.k)).collect::<anyhow::Result<_>>()?;
    for &rows in run.sizes.gemm_rows {
        let x = own.compute(rows, shape.k)?;
        let mut time = |kit: &mut Kit| -> anyhow::Result<f64> {
            let mut out = output(kit, shape, rows)?;
            kit.time(|device, i| {
                let w = &weights[i % weights.len()];
                if shape.gated {
                    device.gate_up_silu_mul(&x, w, &mut out);
                } else {
                    device.linear(&x, w, None, &mut out);
                }
            })
        };
        let ours = time(own)?;
        let theirs = cublas.as_deref_mut().map(&mut time).transpose()?;
        report(run, ceilings, (shape, rows), (ours, theirs));
    }
    Ok(())
}

fn output(kit: &mut Kit, shape: &GemmShape, rows: usize) -> anyhow::Result<Tensor> {
    let device: &mut Device = &mut kit.device;
    Ok(if shape.gated {
        device.tensor(rows, shape.n / 2, TensorKind::Compute)?
    } else {
        device.tensor(rows, shape.n, TensorKind::F32)?
    })
}

fn report(
    run: &mut Run,
    ceilings: &Ceilings,
    (shape, rows): (&GemmShape, usize),
    (ours, theirs): (f64, Option<f64>),
) {
    let GemmShape { name, n, k, gated } = *shape;
    let flops = 2.0 * (rows * n * k) as f64;
    let out_bytes = if gated { rows * n } else { 4 * rows * n };
    let bytes = (2 * (n * k + rows * k) + out_bytes) as f64;
    let params = |by: &str| json!({"weight": name, "rows": rows, "n": n, "k": k, "by": by});
    let best = flops / ceilings.seconds(bytes, flops) / 1e12;
    let figure = |by: &str, ms: f64| {
        let figure = Figure::new("product", "TFLOP/s", params(by)).ms(ms);
        figure.value(flops / ms / 1e9).ceiling(Some(best), ROOFLINE)
    };
    run.figure(figure("Triton", ours));
    if let Some(theirs) = theirs {
        run.figure(figure("cuBLASLt", theirs));
        let speed = Figure::new("speed of Triton", "% of cuBLASLt", params("both"));
        run.figure(speed.value(100.0 * theirs / ours).aim(CUBLAS_AIM));
    }
}
