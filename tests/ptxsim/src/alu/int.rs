//! Integers and bits.

use super::{Alu, alu};

/// Rows over 32 and 64 bits, or 16 too, with the same formula.
macro_rules! same {
    ($bits:expr, |$a:ident, $b:ident| $body:block, $($width:literal => $type:ty),+) => {
        match $bits {
            $($width => Some(alu!(|$a: $type, $b: $type| -> $type $body)),)+
            _ => None,
        }
    };
}

pub(super) fn lookup(opcode: &str) -> Option<Alu> {
    arithmetic(opcode)
        .or_else(|| product(opcode))
        .or_else(|| bits(opcode))
        .or_else(|| field(opcode))
}

fn arithmetic(opcode: &str) -> Option<Alu> {
    let (name, ty) = opcode.split_once('.')?;
    match name {
        "add" => same!(ty, |a, b| { a.wrapping_add(b) },
            "s16" => u16, "u16" => u16, "s32" => u32, "u32" => u32, "s64" => u64, "u64" => u64),
        "sub" => same!(ty, |a, b| { a.wrapping_sub(b) },
            "s16" => u16, "u16" => u16, "s32" => u32, "u32" => u32, "s64" => u64, "u64" => u64),
        "min" => same!(ty, |a, b| { a.min(b) },
            "s16" => i16, "u16" => u16, "s32" => i32, "u32" => u32, "s64" => i64, "u64" => u64),
        "max" => same!(ty, |a, b| { a.max(b) },
            "s16" => i16, "u16" => u16, "s32" => i32, "u32" => u32, "s64" => i64, "u64" => u64),
        "div" => {
            undefined_at_zero(same!(ty, |a, b| { if b == 0 { 0 } else { a.wrapping_div(b) } },
            "s32" => i32, "u32" => u32, "s64" => i64, "u64" => u64)?)
        }
        "rem" => {
            undefined_at_zero(same!(ty, |a, b| { if b == 0 { 0 } else { a.wrapping_rem(b) } },
            "s32" => i32, "u32" => u32, "s64" => i64, "u64" => u64)?)
        }
        _ => None,
    }
    .or_else(|| match opcode {
        "neg.s16" => Some(alu!(|a: i16| -> i16 { a.wrapping_neg() })),
        "neg.s32" => Some(alu!(|a: i32| -> i32 { a.wrapping_neg() })),
        "neg.s64" => Some(alu!(|a: i64| -> i64 { a.wrapping_neg() })),
        "abs.s32" => Some(alu!(|a: i32| -> i32 { a.wrapping_abs() })),
        "abs.s64" => Some(alu!(|a: i64| -> i64 { a.wrapping_abs() })),
        _ => None,
    })
}

fn undefined_at_zero(alu: Alu) -> Option<Alu> {
    Some(Alu { zero_undefined: true, ..alu })
}

fn product(opcode: &str) -> Option<Alu> {
    Some(match opcode {
        "mul.lo.s16" | "mul.lo.u16" => alu!(|a: u16, b: u16| -> u16 { a.wrapping_mul(b) }),
        "mul.lo.s32" | "mul.lo.u32" => alu!(|a: u32, b: u32| -> u32 { a.wrapping_mul(b) }),
        "mul.lo.s64" | "mul.lo.u64" => alu!(|a: u64, b: u64| -> u64 { a.wrapping_mul(b) }),
        "mul.hi.u16" => {
            alu!(|a: u16, b: u16| -> u16 { ((u32::from(a) * u32::from(b)) >> 16) as u16 })
        }
        "mul.hi.s16" => {
            alu!(|a: i16, b: i16| -> i16 { ((i32::from(a) * i32::from(b)) >> 16) as i16 })
        }
        "mul.hi.s32" => {
            alu!(|a: i32, b: i32| -> i32 { ((i64::from(a) * i64::from(b)) >> 32) as i32 })
        }
        "mul.hi.u32" => {
            alu!(|a: u32, b: u32| -> u32 { ((u64::from(a) * u64::from(b)) >> 32) as u32 })
        }
        "mul.hi.s64" => {
            alu!(|a: i64, b: i64| -> i64 { ((i128::from(a) * i128::from(b)) >> 64) as i64 })
        }
        "mul.hi.u64" => {
            alu!(|a: u64, b: u64| -> u64 { ((u128::from(a) * u128::from(b)) >> 64) as u64 })
        }
        "mul.wide.s16" => alu!(|a: i16, b: i16| -> i32 { i32::from(a) * i32::from(b) }),
        "mul.wide.u16" => alu!(|a: u16, b: u16| -> u32 { u32::from(a) * u32::from(b) }),
        "mul.wide.s32" => alu!(|a: i32, b: i32| -> i64 { i64::from(a) * i64::from(b) }),
        "mul.wide.u32" => alu!(|a: u32, b: u32| -> u64 { u64::from(a) * u64::from(b) }),
        "mad.lo.s16" | "mad.lo.u16" => {
            alu!(|a: u16, b: u16, c: u16| -> u16 { a.wrapping_mul(b).wrapping_add(c) })
        }
        "mad.lo.s32" | "mad.lo.u32" => {
            alu!(|a: u32, b: u32, c: u32| -> u32 { a.wrapping_mul(b).wrapping_add(c) })
        }
        "mad.lo.s64" | "mad.lo.u64" => {
            alu!(|a: u64, b: u64, c: u64| -> u64 { a.wrapping_mul(b).wrapping_add(c) })
        }
        "mad.wide.s32" => {
            alu!(|a: i32, b: i32, c: i64| -> i64 { (i64::from(a) * i64::from(b)).wrapping_add(c) })
        }
        "mad.wide.u32" => {
            alu!(|a: u32, b: u32, c: u64| -> u64 { (u64::from(a) * u64::from(b)).wrapping_add(c) })
        }
        _ => return None,
    })
}

fn bits(opcode: &str) -> Option<Alu> {
    let (name, ty) = opcode.split_once('.')?;
    match name {
        "and" => same!(ty, |a, b| { a & b }, "b16" => u16, "b32" => u32, "b64" => u64),
        "or" => same!(ty, |a, b| { a | b }, "b16" => u16, "b32" => u32, "b64" => u64),
        "xor" => same!(ty, |a, b| { a ^ b }, "b16" => u16, "b32" => u32, "b64" => u64),
        _ => None,
    }
    .or_else(|| match opcode {
        "not.b16" => Some(alu!(|a: u16| -> u16 { !a })),
        "not.b32" => Some(alu!(|a: u32| -> u32 { !a })),
        "not.b64" => Some(alu!(|a: u64| -> u64 { !a })),
        // The distance is 32 bits wide whatever the type; one that reaches past it shifts all out.
        "shl.b16" => Some(alu!(|a: u16, n: u32| -> u16 { a.checked_shl(n).unwrap_or(0) })),
        "shl.b32" => Some(alu!(|a: u32, n: u32| -> u32 { a.checked_shl(n).unwrap_or(0) })),
        "shl.b64" => Some(alu!(|a: u64, n: u32| -> u64 { a.checked_shl(n).unwrap_or(0) })),
        "shr.b16" | "shr.u16" => {
            Some(alu!(|a: u16, n: u32| -> u16 { a.checked_shr(n).unwrap_or(0) }))
        }
        "shr.b32" | "shr.u32" => {
            Some(alu!(|a: u32, n: u32| -> u32 { a.checked_shr(n).unwrap_or(0) }))
        }
        "shr.b64" | "shr.u64" => {
            Some(alu!(|a: u64, n: u32| -> u64 { a.checked_shr(n).unwrap_or(0) }))
        }
        "shr.s16" => Some(alu!(|a: i16, n: u32| -> i16 { a >> n.min(15) })),
        "shr.s32" => Some(alu!(|a: i32, n: u32| -> i32 { a >> n.min(31) })),
        "shr.s64" => Some(alu!(|a: i64, n: u32| -> i64 { a >> n.min(63) })),
        "popc.b32" => Some(alu!(|a: u32| -> u32 { a.count_ones() })),
        "popc.b64" => Some(alu!(|a: u64| -> u32 { a.count_ones() })),
        "clz.b32" => Some(alu!(|a: u32| -> u32 { a.leading_zeros() })),
        "clz.b64" => Some(alu!(|a: u64| -> u32 { a.leading_zeros() })),
        "brev.b32" => Some(alu!(|a: u32| -> u32 { a.reverse_bits() })),
        _ => None,
    })
}

/// Bit fields, byte permutation and funnel shifts.
fn field(opcode: &str) -> Option<Alu> {
    Some(match opcode {
        "bfe.u32" => alu!(|a: u32, pos: u32, len: u32| -> u32 {
            let shifted = a.checked_shr(pos & 0xff).unwrap_or(0);
            shifted & low_bits(len & 0xff)
        }),
        "bfe.s32" => alu!(|a: i32, pos: u32, len: u32| -> i32 {
            let (pos, len) = (pos & 0xff, len & 0xff);
            if len == 0 {
                0
            } else {
                // Bits past the top are copies of the sign.
                let field = i64::from(a) >> pos.min(63);
                let unused = 64 - len.min(32);
                (field << unused >> unused) as i32
            }
        }),
        "shf.l.wrap.b32" => alu!(|low: u32, high: u32, n: u32| -> u32 {
            ((u64::from(high) << 32 | u64::from(low)) << (n & 31) >> 32) as u32
        }),
        "shf.r.wrap.b32" => alu!(|low: u32, high: u32, n: u32| -> u32 {
            ((u64::from(high) << 32 | u64::from(low)) >> (n & 31)) as u32
        }),
        "prmt.b32" => alu!(|a: u32, b: u32, selectors: u32| -> u32 {
            permute(u64::from(b) << 32 | u64::from(a), selectors)
        }),
        _ => return None,
    })
}

/// A mask of the `len` lowest bits.
fn low_bits(len: u32) -> u32 {
    1u32.checked_shl(len).map_or(u32::MAX, |bit| bit - 1)
}

/// `prmt`: each nibble of `selectors` picks a byte of `bytes`; its top bit spreads the byte's sign.
fn permute(bytes: u64, selectors: u32) -> u32 {
    let pick = |i: u32| {
        let selector = selectors >> (4 * i) & 15;
        let byte = (bytes >> (8 * (selector & 7))) as u8;
        let byte = if selector & 8 == 0 { byte } else { (byte as i8 >> 7) as u8 };
        u32::from(byte) << (8 * i)
    };
    (0..4).map(pick).sum()
}

/// `lop3`: bit i of the result is bit (a, b, c) of `table`.
pub fn lop3(a: u64, b: u64, c: u64, table: u8) -> u64 {
    let term = |i: u8| {
        let pick = |x: u64, bit: u8| if i >> bit & 1 == 1 { x } else { !x };
        if table >> i & 1 == 1 { pick(a, 2) & pick(b, 1) & pick(c, 0) } else { 0 }
    };
    (0..8).map(term).fold(0, |x, y| x | y) & 0xffff_ffff
}
