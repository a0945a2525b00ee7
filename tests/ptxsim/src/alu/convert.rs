//! `cvt`. Float to integer saturates and takes NaN to 0, as PTX says and Rust's `as` does.

use super::{Alu, Bf16, F16, Pair, alu};

pub(super) fn lookup(opcode: &str) -> Option<Alu> {
    let rest = opcode.strip_prefix("cvt.")?;
    float_to_float(rest).or_else(|| int_to_float(rest)).or_else(|| float_to_int(rest)).or_else(
        || {
            let (to, from) = rest.split_once('.')?;
            int_to_int(to, from)
        },
    )
}

fn float_to_float(rest: &str) -> Option<Alu> {
    Some(match rest {
        "f32.f16" => alu!(|a: F16| -> f32 { a.0 }),
        "f32.bf16" => alu!(|a: Bf16| -> f32 { a.0 }),
        "rn.f16.f32" => alu!(|a: f32| -> F16 { F16(a) }),
        "rn.bf16.f32" => alu!(|a: f32| -> Bf16 { Bf16(a) }),
        // The first source is the high half.
        "rn.f16x2.f32" => alu!(|high: f32, low: f32| -> Pair<F16> { Pair(F16(low), F16(high)) }),
        "rn.bf16x2.f32" => {
            alu!(|high: f32, low: f32| -> Pair<Bf16> { Pair(Bf16(low), Bf16(high)) })
        }
        "f64.f32" => alu!(|a: f32| -> f64 { f64::from(a) }),
        "rn.f32.f64" => alu!(|a: f64| -> f32 { a as f32 }),
        "rni.f32.f32" => alu!(|a: f32| -> f32 { a.round_ties_even() }),
        "rzi.f32.f32" => alu!(|a: f32| -> f32 { a.trunc() }),
        "rmi.f32.f32" => alu!(|a: f32| -> f32 { a.floor() }),
        "rpi.f32.f32" => alu!(|a: f32| -> f32 { a.ceil() }),
        "rni.f64.f64" => alu!(|a: f64| -> f64 { a.round_ties_even() }),
        "rzi.f64.f64" => alu!(|a: f64| -> f64 { a.trunc() }),
        "rmi.f64.f64" => alu!(|a: f64| -> f64 { a.floor() }),
        "rpi.f64.f64" => alu!(|a: f64| -> f64 { a.ceil() }),
        _ => return None,
    })
}

fn int_to_float(rest: &str) -> Option<Alu> {
    Some(match rest {
        "rn.f32.s16" => alu!(|a: i16| -> f32 { f32::from(a) }),
        "rn.f32.u16" => alu!(|a: u16| -> f32 { f32::from(a) }),
        "rn.f32.s32" => alu!(|a: i32| -> f32 { a as f32 }),
        "rn.f32.u32" => alu!(|a: u32| -> f32 { a as f32 }),
        "rn.f32.s64" => alu!(|a: i64| -> f32 { a as f32 }),
        "rn.f32.u64" => alu!(|a: u64| -> f32 { a as f32 }),
        "rn.f64.s32" => alu!(|a: i32| -> f64 { f64::from(a) }),
        "rn.f64.u32" => alu!(|a: u32| -> f64 { f64::from(a) }),
        "rn.f64.s64" => alu!(|a: i64| -> f64 { a as f64 }),
        "rn.f64.u64" => alu!(|a: u64| -> f64 { a as f64 }),
        _ => return None,
    })
}

/// Rows of each rounding mode: nearest even, towards zero, down, up.
macro_rules! rounded {
    ($mode:expr, $float:ty => $int:ty) => {
        match $mode {
            "rni" => Some(alu!(|a: $float| -> $int { a.round_ties_even() as $int })),
            "rzi" => Some(alu!(|a: $float| -> $int { a as $int })),
            "rmi" => Some(alu!(|a: $float| -> $int { a.floor() as $int })),
            "rpi" => Some(alu!(|a: $float| -> $int { a.ceil() as $int })),
            _ => None,
        }
    };
}

fn float_to_int(rest: &str) -> Option<Alu> {
    let (mode, types) = rest.split_once('.')?;
    match types {
        "s32.f32" => rounded!(mode, f32 => i32),
        "u32.f32" => rounded!(mode, f32 => u32),
        "s64.f32" => rounded!(mode, f32 => i64),
        "u64.f32" => rounded!(mode, f32 => u64),
        "s64.f64" => rounded!(mode, f64 => i64),
        "u64.f64" => rounded!(mode, f64 => u64),
        _ => None,
    }
}

/// Rows from one integer type to all: cut off, or extended as the source is signed or not.
macro_rules! from {
    ($from:ty, $to:expr) => {
        match $to {
            "u16" => Some(alu!(|a: $from| -> u16 { a as u16 })),
            "s16" => Some(alu!(|a: $from| -> i16 { a as i16 })),
            "u32" => Some(alu!(|a: $from| -> u32 { a as u32 })),
            "s32" => Some(alu!(|a: $from| -> i32 { a as i32 })),
            "u64" => Some(alu!(|a: $from| -> u64 { a as u64 })),
            "s64" => Some(alu!(|a: $from| -> i64 { a as i64 })),
            _ => None,
        }
    };
}

fn int_to_int(to: &str, from: &str) -> Option<Alu> {
    match from {
        "u16" => from!(u16, to),
        "s16" => from!(i16, to),
        "u32" => from!(u32, to),
        "s32" => from!(i32, to),
        "u64" => from!(u64, to),
        "s64" => from!(i64, to),
        _ => None,
    }
}
