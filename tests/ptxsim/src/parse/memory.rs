//! Loads, stores, asynchronous copies and `ldmatrix`.

use super::body::Scope;
use super::decode::exactly;
use super::operand::Operand;
use crate::program::{Element, Load, Op, Store};

/// Hints to the caches: they change no value.
const CACHE_HINTS: &[&str] =
    &["ca", "cg", "cs", "L1::evict_first", "L1::evict_last", "L1::no_allocate"];

pub(super) fn decode(
    opcode: &str,
    operands: &[Operand],
    scope: &mut Scope<'_>,
) -> Result<Option<Op>, String> {
    let parts: Vec<&str> = opcode.split('.').collect();
    match parts[..] {
        ["ld", "param", ty] => load_param(ty, operands),
        ["ld", "global", ref rest @ ..] => {
            let hinted = rest.strip_prefix_hint();
            Ok(load(hinted, 64, operands, scope)?.map(Op::LoadGlobal))
        }
        ["ld", "shared", ref rest @ ..] => Ok(load(rest, 32, operands, scope)?.map(Op::LoadShared)),
        ["st", "global", ref rest @ ..] => {
            let hinted = rest.strip_prefix_hint();
            Ok(store(hinted, 64, operands, scope)?.map(Op::StoreGlobal))
        }
        ["st", "shared" | "shared::cta", ref rest @ ..] => {
            Ok(store(rest, 32, operands, scope)?.map(Op::StoreShared))
        }
        ["cp", "async", ref rest @ ..] => copy_async(rest, operands, scope),
        ["ldmatrix", "sync", "aligned", "m8n8", ref rest @ ..] => matrix(rest, operands, scope),
        _ => Ok(None),
    }
}

trait Hinted {
    /// The modifiers without a leading cache hint.
    fn strip_prefix_hint(&self) -> &Self;
}

impl Hinted for [&str] {
    fn strip_prefix_hint(&self) -> &Self {
        match self {
            [hint, rest @ ..] if CACHE_HINTS.contains(hint) => rest,
            _ => self,
        }
    }
}

fn element(ty: &str) -> Option<Element> {
    let bytes = match ty.get(1..)? {
        "8" => 1,
        "16" => 2,
        "32" => 4,
        "64" => 8,
        _ => return None,
    };
    match ty.as_bytes()[0] {
        b'b' | b'u' => Some(Element { bytes, signed: false }),
        b's' => Some(Element { bytes, signed: true }),
        b'f' if bytes >= 4 => Some(Element { bytes, signed: false }),
        _ => None,
    }
}

/// `[vN.]TYPE` → number of elements, element.
fn vector(modifiers: &[&str]) -> Option<(usize, Element)> {
    let (count, ty) = match *modifiers {
        [ty] => (1, ty),
        ["v2", ty] => (2, ty),
        ["v4", ty] => (4, ty),
        _ => return None,
    };
    let element = element(ty)?;
    (count * element.bytes <= 16).then_some((count, element))
}

/// The registers of a vector access: `count` of them.
fn registers(operand: &Operand, count: usize) -> Result<&[Operand], String> {
    let elements = operand.elements();
    if elements.len() == count {
        Ok(elements)
    } else {
        Err(format!("{count} registers are needed, there are {}", elements.len()))
    }
}

/// Bits of a register that holds an element; there are none of 8 bits.
fn register_bits(element: Element) -> u32 {
    (8 * element.bytes as u32).max(16)
}

fn load_param(ty: &str, operands: &[Operand]) -> Result<Option<Op>, String> {
    let Some(element) = element(ty) else { return Ok(None) };
    let [dst, source] = exactly(operands)?;
    let (dst, dst_bits) = dst.dst_at_least(register_bits(element))?;
    match *source {
        Operand::Param { offset, bytes } if bytes == element.bytes => {
            Ok(Some(Op::LoadParam { dst, offset, element, dst_bits }))
        }
        Operand::Param { bytes, .. } => {
            Err(format!("{} bytes of a parameter of {bytes}", element.bytes))
        }
        _ => Err(format!("a parameter is needed, not {source:?}")),
    }
}

fn load(
    modifiers: &[&str],
    address_bits: u32,
    operands: &[Operand],
    scope: &mut Scope<'_>,
) -> Result<Option<Load>, String> {
    let Some((count, element)) = vector(modifiers) else { return Ok(None) };
    let [dsts, address] = exactly(operands)?;
    let mut dst_bits = register_bits(element);
    let mut regs = Vec::with_capacity(count);
    for dst in registers(dsts, count)? {
        regs.push(match dst {
            Operand::Sink => None,
            _ => {
                let (reg, bits) = dst.dst_at_least(register_bits(element))?;
                dst_bits = bits;
                Some(reg)
            }
        });
    }
    let address = address.address(address_bits, scope)?;
    Ok(Some(Load { dsts: regs, dst_bits, element, address }))
}

fn store(
    modifiers: &[&str],
    address_bits: u32,
    operands: &[Operand],
    scope: &mut Scope<'_>,
) -> Result<Option<Store>, String> {
    let Some((count, element)) = vector(modifiers) else { return Ok(None) };
    let [address, srcs] = exactly(operands)?;
    let srcs = registers(srcs, count)?
        .iter()
        .map(|src| match *src {
            // The register may be wider than what is stored of it.
            Operand::Reg { reg, bits } if bits >= register_bits(element) => {
                Ok(crate::program::Src::Reg(reg))
            }
            _ => src.raw(register_bits(element), scope),
        })
        .collect::<Result<_, _>>()?;
    let address = address.address(address_bits, scope)?;
    Ok(Some(Store { srcs, element, address }))
}

fn copy_async(
    modifiers: &[&str],
    operands: &[Operand],
    scope: &mut Scope<'_>,
) -> Result<Option<Op>, String> {
    let sizes: &[u64] = match *modifiers {
        ["commit_group"] => return exactly::<0>(operands).map(|_| Some(Op::CommitGroup)),
        ["wait_group"] => {
            let [keep] = exactly(operands)?;
            let keep = usize::try_from(keep.int()?).map_err(|_| "too many groups")?;
            return Ok(Some(Op::WaitGroup { keep }));
        }
        ["ca", "shared", "global"] => &[4, 8, 16],
        ["cg", "shared", "global"] => &[16],
        _ => return Ok(None),
    };
    let (to, from, size, from_bytes) = match operands {
        [to, from, size] => (to, from, size, None),
        [to, from, size, from_bytes] => (to, from, size, Some(from_bytes.raw(32, scope)?)),
        _ => return Err(format!("3 or 4 operands are needed, there are {}", operands.len())),
    };
    let size = size.int()?;
    if !sizes.contains(&size) {
        return Err(format!("copies of {size} bytes; this instruction has {sizes:?}"));
    }
    let (to, from) = (to.address(32, scope)?, from.address(64, scope)?);
    Ok(Some(Op::CopyAsync { to, from, size: size as usize, from_bytes }))
}

fn matrix(
    modifiers: &[&str],
    operands: &[Operand],
    scope: &mut Scope<'_>,
) -> Result<Option<Op>, String> {
    let (count, transposed) = match *modifiers {
        [count, "shared", "b16"] => (count, false),
        [count, "trans", "shared", "b16"] => (count, true),
        _ => return Ok(None),
    };
    let count = match count {
        "x1" => 1,
        "x2" => 2,
        "x4" => 4,
        _ => return Ok(None),
    };
    let [dsts, address] = exactly(operands)?;
    let dsts = registers(dsts, count)?.iter().map(|dst| dst.dst(32)).collect::<Result<_, _>>()?;
    Ok(Some(Op::LoadMatrix { dsts, address: address.address(32, scope)?, transposed }))
}
