//! f32 and f64.
//!
//! Arithmetic is IEEE with one rounding to nearest even. The `.approx` and `.full` instructions
//! are not modelled bit by bit: hardware's are within 2 ulp (`div.full`), 2^−22 relative
//! (`ex2`, `rsqrt`), 1 ulp (`rcp`) or 2^−22 absolute (`lg2` near 1) of what is returned here,
//! which is the value in f64, rounded once.

use super::{Alu, alu};

pub(super) fn lookup(opcode: &str) -> Option<Alu> {
    let (plain, flush) = match opcode.replacen(".ftz", "", 1) {
        plain if plain != opcode => (plain, true),
        plain => (plain, false),
    };
    if flush { flushing(&plain) } else { f32_rows(&plain).or_else(|| f64_rows(&plain)) }
}

fn counted(flops: u32, alu: Alu) -> Option<Alu> {
    Some(Alu { flops, ..alu })
}

fn f32_rows(opcode: &str) -> Option<Alu> {
    match opcode {
        "add.f32" | "add.rn.f32" => counted(1, alu!(|a: f32, b: f32| -> f32 { a + b })),
        "sub.f32" | "sub.rn.f32" => counted(1, alu!(|a: f32, b: f32| -> f32 { a - b })),
        "mul.f32" | "mul.rn.f32" => counted(1, alu!(|a: f32, b: f32| -> f32 { a * b })),
        "fma.rn.f32" => counted(2, alu!(|a: f32, b: f32, c: f32| -> f32 { a.mul_add(b, c) })),
        "div.rn.f32" | "div.full.f32" => counted(1, alu!(|a: f32, b: f32| -> f32 { a / b })),
        "sqrt.rn.f32" | "sqrt.approx.f32" => counted(1, alu!(|a: f32| -> f32 { a.sqrt() })),
        "rcp.rn.f32" | "rcp.approx.f32" => counted(1, alu!(|a: f32| -> f32 { 1.0 / a })),
        "rsqrt.approx.f32" => counted(1, alu!(|a: f32| -> f32 { rsqrt(a) })),
        "ex2.approx.f32" => counted(1, alu!(|a: f32| -> f32 { exp2(a) })),
        "lg2.approx.f32" => counted(1, alu!(|a: f32| -> f32 { log2(a) })),
        "max.f32" => counted(1, alu!(|a: f32, b: f32| -> f32 { maximum(a, b) })),
        "min.f32" => counted(1, alu!(|a: f32, b: f32| -> f32 { minimum(a, b) })),
        "max.NaN.f32" => counted(
            1,
            alu!(|a: f32, b: f32| -> f32 {
                if a.is_nan() || b.is_nan() { f32::NAN } else { maximum(a, b) }
            }),
        ),
        "min.NaN.f32" => counted(
            1,
            alu!(|a: f32, b: f32| -> f32 {
                if a.is_nan() || b.is_nan() { f32::NAN } else { minimum(a, b) }
            }),
        ),
        "neg.f32" => counted(0, alu!(|a: f32| -> f32 { -a })),
        "abs.f32" => counted(0, alu!(|a: f32| -> f32 { a.abs() })),
        "copysign.f32" => counted(0, alu!(|sign: f32, a: f32| -> f32 { a.copysign(sign) })),
        _ => None,
    }
}

/// Rows with `.ftz`: subnormal sources and results become zeros of their sign.
fn flushing(opcode: &str) -> Option<Alu> {
    match opcode {
        "add.f32" | "add.rn.f32" => {
            counted(1, alu!(|a: f32, b: f32| -> f32 { ftz(ftz(a) + ftz(b)) }))
        }
        "sub.f32" | "sub.rn.f32" => {
            counted(1, alu!(|a: f32, b: f32| -> f32 { ftz(ftz(a) - ftz(b)) }))
        }
        "mul.f32" | "mul.rn.f32" => {
            counted(1, alu!(|a: f32, b: f32| -> f32 { ftz(ftz(a) * ftz(b)) }))
        }
        "fma.rn.f32" => counted(
            2,
            alu!(|a: f32, b: f32, c: f32| -> f32 { ftz(ftz(a).mul_add(ftz(b), ftz(c))) }),
        ),
        "div.full.f32" => counted(1, alu!(|a: f32, b: f32| -> f32 { ftz(ftz(a) / ftz(b)) })),
        "sqrt.approx.f32" => counted(1, alu!(|a: f32| -> f32 { ftz(a).sqrt() })),
        "rcp.approx.f32" => counted(1, alu!(|a: f32| -> f32 { ftz(1.0 / ftz(a)) })),
        "rsqrt.approx.f32" => counted(1, alu!(|a: f32| -> f32 { rsqrt(ftz(a)) })),
        "ex2.approx.f32" => counted(1, alu!(|a: f32| -> f32 { ftz(exp2(ftz(a))) })),
        "lg2.approx.f32" => counted(1, alu!(|a: f32| -> f32 { log2(ftz(a)) })),
        _ => None,
    }
}

fn f64_rows(opcode: &str) -> Option<Alu> {
    match opcode {
        "add.f64" | "add.rn.f64" => counted(1, alu!(|a: f64, b: f64| -> f64 { a + b })),
        "sub.f64" | "sub.rn.f64" => counted(1, alu!(|a: f64, b: f64| -> f64 { a - b })),
        "mul.f64" | "mul.rn.f64" => counted(1, alu!(|a: f64, b: f64| -> f64 { a * b })),
        "fma.rn.f64" => counted(2, alu!(|a: f64, b: f64, c: f64| -> f64 { a.mul_add(b, c) })),
        "div.rn.f64" => counted(1, alu!(|a: f64, b: f64| -> f64 { a / b })),
        _ => None,
    }
}

/// A subnormal becomes a zero of the same sign.
fn ftz(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

fn exp2(x: f32) -> f32 {
    f64::from(x).exp2() as f32
}

fn log2(x: f32) -> f32 {
    f64::from(x).log2() as f32
}

fn rsqrt(x: f32) -> f32 {
    // 1/√(−0) is −∞ in PTX as in IEEE.
    (1.0 / f64::from(x).sqrt()) as f32
}

/// The larger one; a NaN loses to a number, and −0 is below +0.
pub(super) fn maximum(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        b
    } else if b.is_nan() {
        a
    } else if a == b {
        // Equal and of different bits: zeros, of which the positive one has the smaller bits.
        f32::from_bits(a.to_bits() & b.to_bits())
    } else if a > b {
        a
    } else {
        b
    }
}

/// The smaller one; a NaN loses to a number, and −0 is below +0.
pub(super) fn minimum(a: f32, b: f32) -> f32 {
    -maximum(-a, -b)
}
