//! `silu_mul`.

use quire_ptxsim::CtaOrder;
use quire_tests::args;
use quire_tests::ptx::{Element, Gpu, Kernels, Variant};
use quire_tests::rng::Rng;

pub const TESTED: &[&str] = &["silu_mul"];

pub fn run(variant: &Variant<'_>, gate_up: &[f32], width: usize, order: CtaOrder) -> Vec<f32> {
    let (mut gpu, rows) = (Gpu::ordered(order), gate_up.len() / (2 * width));
    let out = gpu.empty("out", rows * width * variant.element().bytes());
    let gate_up = gpu.floats("gate_up", Element::F32, gate_up);
    let grid = [rows, width.div_ceil(variant.constant("BLOCK"))];
    gpu.launch(variant, &grid, args![out, gate_up, width]);
    gpu.read(out, variant.element(), rows * width)
}

#[test]
fn gates() {
    let kernels = Kernels::load();
    for variant in kernels.variants("silu_mul") {
        for width in [16, 1008, 1024, 2064] {
            let mut x = Rng::new(width as u64).floats(3 * 2 * width, 20.0);
            x[..4].copy_from_slice(&[-200.0, 200.0, 0.0, -88.5]);
            let got = run(&variant, &x, width, CtaOrder::Forward);
            let ulp = variant.element().ulp();
            for (i, &got) in got.iter().enumerate() {
                let row = &x[i / width * 2 * width..];
                let (gate, up) = (f64::from(row[i % width]), f64::from(row[width + i % width]));
                let want = gate / (1.0 + (-gate).exp()) * up;
                let bound = (ulp + 2f64.powi(-20)) * want.abs() + 1e-7;
                assert!((f64::from(got) - want).abs() <= bound, "{i}: {got} is not {want}");
            }
            let alone = run(&variant, &x[2 * width..4 * width], width, CtaOrder::Reverse);
            assert_eq!(alone, got[width..2 * width], "{}: a row alone", variant.name());
        }
    }
}
