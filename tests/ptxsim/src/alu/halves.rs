//! f16 and bf16, alone and in pairs: the ones that sm_80 has.
//!
//! Sums and products of f16 are taken in f32, whose 24 bits are more than twice f16's 11, so that
//! rounding again is innocuous. Fused ones round once, see [`fused`].

use super::float::{maximum, minimum};
use super::{Alu, Bf16, F16, Pair, alu};

/// Rows of one element type; `$name` is the opcode without the type.
macro_rules! single {
    ($name:expr, $t:ident) => {
        match $name {
            "fma.rn" => counted(2, alu!(|a: $t, b: $t, c: $t| -> $t { $t(fused(a.0, b.0, c.0)) })),
            "max" => counted(1, alu!(|a: $t, b: $t| -> $t { $t(maximum(a.0, b.0)) })),
            "min" => counted(1, alu!(|a: $t, b: $t| -> $t { $t(minimum(a.0, b.0)) })),
            "neg" => counted(0, alu!(|a: $t| -> $t { $t(-a.0) })),
            "abs" => counted(0, alu!(|a: $t| -> $t { $t(a.0.abs()) })),
            _ => None,
        }
    };
}

/// The same for two elements in a register.
macro_rules! double {
    ($name:expr, $t:ident) => {
        match $name {
            "fma.rn" => counted(
                4,
                alu!(|a: Pair<$t>, b: Pair<$t>, c: Pair<$t>| -> Pair<$t> {
                    Pair($t(fused(a.0.0, b.0.0, c.0.0)), $t(fused(a.1.0, b.1.0, c.1.0)))
                }),
            ),
            "max" => counted(
                2,
                alu!(|a: Pair<$t>, b: Pair<$t>| -> Pair<$t> {
                    Pair($t(maximum(a.0.0, b.0.0)), $t(maximum(a.1.0, b.1.0)))
                }),
            ),
            "min" => counted(
                2,
                alu!(|a: Pair<$t>, b: Pair<$t>| -> Pair<$t> {
                    Pair($t(minimum(a.0.0, b.0.0)), $t(minimum(a.1.0, b.1.0)))
                }),
            ),
            "neg" => counted(0, alu!(|a: Pair<$t>| -> Pair<$t> { Pair($t(-a.0.0), $t(-a.1.0)) })),
            "abs" => counted(
                0,
                alu!(|a: Pair<$t>| -> Pair<$t> { Pair($t(a.0.0.abs()), $t(a.1.0.abs())) }),
            ),
            _ => None,
        }
    };
}

pub(super) fn lookup(opcode: &str) -> Option<Alu> {
    let (name, ty) = opcode.rsplit_once('.')?;
    match ty {
        "f16" => single!(name, F16).or_else(|| f16_only(name)),
        "bf16" => single!(name, Bf16),
        "f16x2" => double!(name, F16).or_else(|| f16x2_only(name)),
        "bf16x2" => double!(name, Bf16),
        _ => None,
    }
}

fn f16_only(name: &str) -> Option<Alu> {
    match name {
        "add" | "add.rn" => counted(1, alu!(|a: F16, b: F16| -> F16 { F16(a.0 + b.0) })),
        "sub" | "sub.rn" => counted(1, alu!(|a: F16, b: F16| -> F16 { F16(a.0 - b.0) })),
        "mul" | "mul.rn" => counted(1, alu!(|a: F16, b: F16| -> F16 { F16(a.0 * b.0) })),
        _ => None,
    }
}

fn f16x2_only(name: &str) -> Option<Alu> {
    type Two = Pair<F16>;
    match name {
        "add" | "add.rn" => counted(
            2,
            alu!(|a: Two, b: Two| -> Two { Pair(F16(a.0.0 + b.0.0), F16(a.1.0 + b.1.0)) }),
        ),
        "sub" | "sub.rn" => counted(
            2,
            alu!(|a: Two, b: Two| -> Two { Pair(F16(a.0.0 - b.0.0), F16(a.1.0 - b.1.0)) }),
        ),
        "mul" | "mul.rn" => counted(
            2,
            alu!(|a: Two, b: Two| -> Two { Pair(F16(a.0.0 * b.0.0), F16(a.1.0 * b.1.0)) }),
        ),
        _ => None,
    }
}

fn counted(flops: u32, alu: Alu) -> Option<Alu> {
    Some(Alu { flops, ..alu })
}

/// a·b + c such that rounding the result to f16 or bf16 is the only rounding.
///
/// The product of two narrow floats is exact in f64. Where the sum or its conversion to f32 is
/// not exact it is rounded to odd, so that no tie of the narrow type can arise from it.
fn fused(a: f32, b: f32, c: f32) -> f32 {
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    if !sum.is_finite() {
        return sum as f32;
    }
    // Error of the sum (Knuth's TwoSum).
    let back = sum - product;
    let error = (product - (sum - back)) + (c - back);
    let odd = match error {
        0.0 => sum,
        _ => f64::from_bits(to_odd(sum.to_bits(), (error < 0.0) != (sum < 0.0))),
    };
    let narrow = odd as f32;
    if f64::from(narrow) == odd || narrow.is_infinite() {
        return narrow;
    }
    let beyond = f64::from(narrow).abs() > odd.abs();
    f32::from_bits(to_odd(narrow.to_bits().into(), beyond) as u32)
}

/// Bits of a float rounded to odd: towards zero first, where `beyond` says that the rounded
/// magnitude is above the exact one.
fn to_odd(bits: u64, beyond: bool) -> u64 {
    (bits - u64::from(beyond)) | 1
}

#[cfg(test)]
mod tests {
    use super::fused;
    use half::{bf16, f16};

    #[test]
    fn a_fused_operation_rounds_once() {
        // 1 + 2^-8 is a tie of bf16 (8 bits); 2^-100 more, lost in f32 and f64, decides it.
        let tie = 1.0 + 2f32.powi(-8);
        let round = |c: f32| bf16::from_f32(fused(tie, 1.0, c)).to_f32();
        assert_eq!(round(0.0), 1.0);
        assert_eq!(round(2f32.powi(-100)), 1.0 + 2f32.powi(-7));
        assert_eq!(round(-2f32.powi(-100)), 1.0);
        let tie = 1.0 + 2f32.powi(-11);
        let round = |c: f32| f16::from_f32(fused(tie, -1.0, c)).to_f32();
        assert_eq!(round(0.0), -1.0);
        assert_eq!(round(-2f32.powi(-24)), -1.0 - 2f32.powi(-10));
        assert_eq!(round(2f32.powi(-24)), -1.0);
    }

    #[test]
    fn exact_results_stay() {
        assert_eq!(fused(3.0, 5.0, -15.0), 0.0);
        assert_eq!(fused(0.0, 5.0, 0.0), 0.0);
        assert_eq!(fused(1.5, 2.0, 0.25), 3.25);
        assert_eq!(fused(f32::INFINITY, 2.0, 1.0), f32::INFINITY);
        assert!(fused(f32::INFINITY, 0.0, 1.0).is_nan());
    }
}
