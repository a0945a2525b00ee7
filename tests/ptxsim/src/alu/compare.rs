//! The conditions of `setp`.

use super::{Bf16, F16, LANES, Lane, Lanes, Shape};

/// One comparison and type.
#[derive(Clone, Copy, Debug)]
pub struct Compare {
    /// Class of both sources.
    pub shape: Shape,
    /// Bit `lane` of the result is whether the condition holds there.
    pub eval: fn(&Lanes, &Lanes) -> u32,
}

macro_rules! compare {
    (|$a:ident, $b:ident: $type:ty| $body:expr) => {{
        fn eval(a: &Lanes, b: &Lanes) -> u32 {
            (0..LANES).fold(0, |mask, lane| {
                let ($a, $b) = (<$type>::from_lane(a[lane]), <$type>::from_lane(b[lane]));
                mask | u32::from($body) << lane
            })
        }
        Some(Compare { shape: <$type>::SHAPE, eval })
    }};
}

macro_rules! integer {
    ($condition:expr, $type:ty) => {
        match $condition {
            "eq" => compare!(|a, b: $type| a == b),
            "ne" => compare!(|a, b: $type| a != b),
            "lt" => compare!(|a, b: $type| a < b),
            "le" => compare!(|a, b: $type| a <= b),
            "gt" => compare!(|a, b: $type| a > b),
            "ge" => compare!(|a, b: $type| a >= b),
            _ => None,
        }
    };
}

/// Ordered conditions are false on NaN, those with `u` are true.
macro_rules! float {
    ($condition:expr, $type:ty, $value:expr) => {
        match $condition {
            "eq" => compare!(|a, b: $type| $value(a) == $value(b)),
            "ne" => compare!(|a, b: $type| $value(a) < $value(b) || $value(a) > $value(b)),
            "lt" => compare!(|a, b: $type| $value(a) < $value(b)),
            "le" => compare!(|a, b: $type| $value(a) <= $value(b)),
            "gt" => compare!(|a, b: $type| $value(a) > $value(b)),
            "ge" => compare!(|a, b: $type| $value(a) >= $value(b)),
            "equ" => {
                compare!(|a, b: $type| unordered($value(a), $value(b)) || $value(a) == $value(b))
            }
            "neu" => compare!(|a, b: $type| $value(a) != $value(b)),
            "ltu" => {
                compare!(|a, b: $type| unordered($value(a), $value(b)) || $value(a) < $value(b))
            }
            "leu" => {
                compare!(|a, b: $type| unordered($value(a), $value(b)) || $value(a) <= $value(b))
            }
            "gtu" => {
                compare!(|a, b: $type| unordered($value(a), $value(b)) || $value(a) > $value(b))
            }
            "geu" => {
                compare!(|a, b: $type| unordered($value(a), $value(b)) || $value(a) >= $value(b))
            }
            "num" => compare!(|a, b: $type| !unordered($value(a), $value(b))),
            "nan" => compare!(|a, b: $type| unordered($value(a), $value(b))),
            _ => None,
        }
    };
}

/// The comparison `condition`, such as `lt`, of two values of type `ty`, such as `s32`.
pub fn lookup(condition: &str, ty: &str) -> Option<Compare> {
    match ty {
        "b16" | "u16" => integer!(condition, u16).filter(|_| signless(condition, ty)),
        "s16" => integer!(condition, i16),
        "b32" | "u32" => integer!(condition, u32).filter(|_| signless(condition, ty)),
        "s32" => integer!(condition, i32),
        "b64" | "u64" => integer!(condition, u64).filter(|_| signless(condition, ty)),
        "s64" => integer!(condition, i64),
        "f16" => float!(condition, F16, |x: F16| x.0),
        "bf16" => float!(condition, Bf16, |x: Bf16| x.0),
        "f32" => float!(condition, f32, |x: f32| x),
        "f64" => float!(condition, f64, |x: f64| x),
        _ => None,
    }
}

/// Bits without a sign have no order.
fn signless(condition: &str, ty: &str) -> bool {
    !ty.starts_with('b') || matches!(condition, "eq" | "ne")
}

/// Whether one of two floats is a NaN.
fn unordered<T: PartialOrd>(a: T, b: T) -> bool {
    a.partial_cmp(&b).is_none()
}
