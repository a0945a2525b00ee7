//! Opcode and operands to a typed operation.

use super::body::Scope;
use super::operand::Operand;
use super::{memory, predicate, warp};
use crate::alu;
use crate::program::{Op, Src};

/// Decodes one instruction; every modifier of `opcode` has to be known.
pub(super) fn instruction(
    opcode: &str,
    operands: &[Operand],
    scope: &mut Scope<'_>,
) -> Result<Op, String> {
    let (name, modifiers) = opcode.split_once('.').unwrap_or((opcode, ""));
    let op = match name {
        "mov" if modifiers != "pred" => mov(modifiers, operands, scope)?,
        "selp" => predicate::select(modifiers, operands, scope)?,
        "setp" => predicate::set(modifiers, operands, scope)?,
        "lop3" => lop3(modifiers, operands, scope)?,
        "bra" | "ret" => flow(opcode, operands)?,
        "ld" | "st" | "cp" | "ldmatrix" => memory::decode(opcode, operands, scope)?,
        "mma" | "shfl" | "vote" | "redux" | "bar" => warp::decode(opcode, operands, scope)?,
        _ if modifiers == "pred" => predicate::logic(name, operands)?,
        _ => lanewise(opcode, operands, scope)?,
    };
    op.ok_or_else(|| format!("unknown opcode or modifier {opcode}"))
}

/// Exactly `N` operands.
pub(super) fn exactly<const N: usize>(operands: &[Operand]) -> Result<&[Operand; N], String> {
    operands
        .try_into()
        .map_err(|_| format!("{N} operands are needed, there are {}", operands.len()))
}

fn lanewise(
    opcode: &str,
    operands: &[Operand],
    scope: &mut Scope<'_>,
) -> Result<Option<Op>, String> {
    let Some(alu) = alu::lookup(opcode) else { return Ok(None) };
    let Some((dst, sources)) = operands.split_first().filter(|(_, s)| s.len() == alu.srcs.len())
    else {
        let wanted = alu.srcs.len() + 1;
        return Err(format!("{wanted} operands are needed, there are {}", operands.len()));
    };
    let mut srcs = [Src::Const(0); 3];
    for ((src, operand), &shape) in srcs.iter_mut().zip(sources).zip(alu.srcs) {
        *src = operand.src(shape, scope)?;
    }
    // Places that the formula does not look at repeat a source, so that they are defined alike.
    for i in sources.len()..3 {
        srcs[i] = srcs[0];
    }
    Ok(Some(Op::Alu { alu, dst: dst.dst(alu.dst.bits)?, srcs }))
}

/// Bits of a type that `mov` knows.
fn bits(ty: &str) -> Option<u32> {
    match ty {
        "b16" | "u16" | "s16" => Some(16),
        "b32" | "u32" | "s32" | "f32" => Some(32),
        "b64" | "u64" | "s64" | "f64" => Some(64),
        _ => None,
    }
}

fn mov(ty: &str, operands: &[Operand], scope: &mut Scope<'_>) -> Result<Option<Op>, String> {
    let Some(bits) = bits(ty) else { return Ok(None) };
    let [dst, src] = exactly(operands)?;
    let part_bits = |parts: &[Operand]| match parts.len() {
        2 | 4 if bits / parts.len() as u32 >= 16 => Ok(bits / parts.len() as u32),
        n => Err(format!("{n} parts do not make a register of {bits} bits")),
    };
    Ok(Some(match (dst, src) {
        (_, Operand::Special(special)) => {
            Op::MoveSpecial { dst: dst.dst(bits)?, special: *special }
        }
        (_, Operand::Vector(parts)) => {
            let part = part_bits(parts)?;
            let parts = parts.iter().map(|p| p.raw(part, scope)).collect::<Result<_, _>>()?;
            Op::Pack { dst: dst.dst(bits)?, parts, bits: part }
        }
        (Operand::Vector(parts), _) => {
            let part = part_bits(parts)?;
            let parts = parts.iter().map(|p| match p {
                Operand::Sink => Ok(None),
                _ => p.dst(part).map(Some),
            });
            let parts = parts.collect::<Result<_, _>>()?;
            Op::Unpack { src: src.raw(bits, scope)?, parts, bits: part }
        }
        _ => Op::Move { dst: dst.dst(bits)?, src: src.raw(bits, scope)? },
    }))
}

fn lop3(ty: &str, operands: &[Operand], scope: &mut Scope<'_>) -> Result<Option<Op>, String> {
    if ty != "b32" {
        return Ok(None);
    }
    let [dst, a, b, c, table] = exactly(operands)?;
    let table = u8::try_from(table.int()?).map_err(|_| "the table of lop3 has 8 bits")?;
    let srcs = [a.raw(32, scope)?, b.raw(32, scope)?, c.raw(32, scope)?];
    Ok(Some(Op::Lop3 { dst: dst.dst(32)?, srcs, table }))
}

fn flow(opcode: &str, operands: &[Operand]) -> Result<Option<Op>, String> {
    let branch = |uniform| match exactly(operands)? {
        [Operand::Label(target)] => Ok(Some(Op::Branch { target: *target, uniform })),
        [other] => Err(format!("a label is needed, not {other:?}")),
    };
    match opcode {
        "bra" => branch(false),
        "bra.uni" => branch(true),
        "ret" => exactly::<0>(operands).map(|_| Some(Op::Return)),
        _ => Ok(None),
    }
}
