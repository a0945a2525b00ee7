//! The instructions that map values of a lane to a value of the same lane.
//!
//! The table is the specification: one row for each opcode *with all its modifiers*, and a row is
//! the formula. An opcode that has no row is unknown, so that no modifier is ever ignored.
//!
//! * [`int`]: integers and bits · [`float`]: f32 and f64 · [`halves`]: f16 and bf16
//! * [`convert`]: `cvt` · [`compare`]: the conditions of `setp`
//!
//! NaN results of f32 arithmetic are the canonical `0x7fffffff`, as the PTX ISA says.

pub mod compare;
mod convert;
mod float;
mod halves;
mod int;

pub use int::lop3;

use half::{bf16, f16};

/// Lanes in a warp.
pub const LANES: usize = 32;

/// One register of a whole warp; a lane's value stands zero-extended in its 64 bits.
pub type Lanes = [u64; LANES];

/// The class of an operand: how wide its register is, and which literals may stand for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// 16, 32 or 64 bits.
    pub bits: u32,
    /// Takes `0f…` and `0d…` literals, else integers.
    pub float: bool,
}

/// What one opcode does to each lane.
#[derive(Clone, Copy, Debug)]
pub struct Alu {
    /// Class of the result.
    pub dst: Shape,
    /// Classes of the sources, in order: at most three.
    pub srcs: &'static [Shape],
    /// The formula over all lanes; entries past `srcs` are not looked at.
    pub eval: fn([&Lanes; 3], &mut Lanes),
    /// Floating-point operations of one lane; a fused multiply-add is two.
    pub flops: u32,
    /// A lane whose second source is 0 has no result: PTX leaves it unspecified.
    pub zero_undefined: bool,
}

/// The row of `opcode`, given with all its modifiers.
pub fn lookup(opcode: &str) -> Option<Alu> {
    int::lookup(opcode)
        .or_else(|| float::lookup(opcode))
        .or_else(|| halves::lookup(opcode))
        .or_else(|| convert::lookup(opcode))
}

/// A type that lanes hold.
pub trait Lane: Copy {
    /// Its operand class.
    const SHAPE: Shape;
    /// From the low bits of a register.
    fn from_lane(bits: u64) -> Self;
    /// To a register, zero-extended.
    fn to_lane(self) -> u64;
}

macro_rules! int_lanes {
    ($($type:ty, $unsigned:ty, $bits:expr;)+) => {$(
        impl Lane for $type {
            const SHAPE: Shape = Shape { bits: $bits, float: false };
            fn from_lane(bits: u64) -> Self {
                bits as $type
            }
            fn to_lane(self) -> u64 {
                u64::from(self as $unsigned)
            }
        }
    )+};
}

int_lanes! {
    u16, u16, 16;
    i16, u16, 16;
    u32, u32, 32;
    i32, u32, 32;
    u64, u64, 64;
    i64, u64, 64;
}

impl Lane for f32 {
    const SHAPE: Shape = Shape { bits: 32, float: true };
    fn from_lane(bits: u64) -> Self {
        f32::from_bits(bits as u32)
    }
    fn to_lane(self) -> u64 {
        u64::from(if self.is_nan() { 0x7fff_ffff } else { self.to_bits() })
    }
}

impl Lane for f64 {
    const SHAPE: Shape = Shape { bits: 64, float: true };
    fn from_lane(bits: u64) -> Self {
        f64::from_bits(bits)
    }
    fn to_lane(self) -> u64 {
        if self.is_nan() { 0x7fff_ffff_ffff_ffff } else { self.to_bits() }
    }
}

/// An f16 register, widened. Writing it rounds to nearest even.
#[derive(Clone, Copy, Debug)]
pub struct F16(pub f32);

/// A bf16 register, widened. Writing it rounds to nearest even.
#[derive(Clone, Copy, Debug)]
pub struct Bf16(pub f32);

/// Two values in a 32-bit register, the first one in the low half.
#[derive(Clone, Copy, Debug)]
pub struct Pair<T>(pub T, pub T);

impl Lane for F16 {
    const SHAPE: Shape = Shape { bits: 16, float: false };
    fn from_lane(bits: u64) -> Self {
        F16(f16::from_bits(bits as u16).to_f32())
    }
    fn to_lane(self) -> u64 {
        u64::from(if self.0.is_nan() { 0x7fff } else { f16::from_f32(self.0).to_bits() })
    }
}

impl Lane for Bf16 {
    const SHAPE: Shape = Shape { bits: 16, float: false };
    fn from_lane(bits: u64) -> Self {
        Bf16(f32::from_bits((bits as u32) << 16))
    }
    fn to_lane(self) -> u64 {
        u64::from(if self.0.is_nan() { 0x7fff } else { bf16::from_f32(self.0).to_bits() })
    }
}

impl<T: Lane> Lane for Pair<T> {
    const SHAPE: Shape = Shape { bits: 32, float: false };
    fn from_lane(bits: u64) -> Self {
        Pair(T::from_lane(bits), T::from_lane(bits >> 16))
    }
    fn to_lane(self) -> u64 {
        self.0.to_lane() | self.1.to_lane() << 16
    }
}

/// A row of the table from a formula with typed parameters.
macro_rules! alu {
    (|$a:ident: $at:ty| -> $d:ty $body:block) => {
        alu!(@row $d, [$at], |srcs, lane| {
            let $a = <$at as $crate::alu::Lane>::from_lane(srcs[0][lane]);
            $body
        })
    };
    (|$a:ident: $at:ty, $b:ident: $bt:ty| -> $d:ty $body:block) => {
        alu!(@row $d, [$at, $bt], |srcs, lane| {
            let $a = <$at as $crate::alu::Lane>::from_lane(srcs[0][lane]);
            let $b = <$bt as $crate::alu::Lane>::from_lane(srcs[1][lane]);
            $body
        })
    };
    (|$a:ident: $at:ty, $b:ident: $bt:ty, $c:ident: $ct:ty| -> $d:ty $body:block) => {
        alu!(@row $d, [$at, $bt, $ct], |srcs, lane| {
            let $a = <$at as $crate::alu::Lane>::from_lane(srcs[0][lane]);
            let $b = <$bt as $crate::alu::Lane>::from_lane(srcs[1][lane]);
            let $c = <$ct as $crate::alu::Lane>::from_lane(srcs[2][lane]);
            $body
        })
    };
    (@row $d:ty, [$($t:ty),+], |$srcs:ident, $lane:ident| $body:block) => {{
        fn eval($srcs: [&$crate::alu::Lanes; 3], out: &mut $crate::alu::Lanes) {
            for $lane in 0..$crate::alu::LANES {
                let value: $d = $body;
                out[$lane] = $crate::alu::Lane::to_lane(value);
            }
        }
        $crate::alu::Alu {
            dst: <$d as $crate::alu::Lane>::SHAPE,
            srcs: &[$(<$t as $crate::alu::Lane>::SHAPE),+],
            eval,
            flops: 0,
            zero_undefined: false,
        }
    }};
}
pub(crate) use alu;
