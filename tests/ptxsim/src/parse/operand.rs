//! Operands: their forms as text, and what an instruction may take them for.

use super::body::Scope;
use crate::alu::Shape;
use crate::program::{Address, Pred, PredSrc, Reg, Special, Src};

/// An operand as written.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Operand {
    Reg {
        reg: Reg,
        bits: u32,
    },
    Pred(Pred),
    /// `!%p`
    NotPred(Pred),
    Int(i128),
    /// Bits of a `0f…` literal.
    Float32(u32),
    /// Bits of a `0d…` literal.
    Float64(u64),
    /// `%tid.x` and its like.
    Special(Special),
    /// The dynamic shared memory.
    Shared(u64),
    /// `{…}`
    Vector(Vec<Operand>),
    /// `[base + offset]`
    Memory {
        base: Box<Operand>,
        offset: i64,
    },
    /// `[parameter]`: offset in the block, bytes.
    Param {
        offset: usize,
        bytes: usize,
    },
    /// Index of an instruction.
    Label(usize),
    /// `_`
    Sink,
}

/// The operands of a statement, at commas outside of brackets.
pub(super) fn parse(text: &str, scope: &Scope<'_>) -> Result<Vec<Operand>, String> {
    let mut depth = 0;
    let parts = text.split(|c: char| {
        depth += i32::from(matches!(c, '{' | '[')) - i32::from(matches!(c, '}' | ']'));
        c == ',' && depth == 0
    });
    let parts: Vec<&str> = parts.map(str::trim).collect();
    if parts == [""] {
        return Ok(Vec::new());
    }
    parts.into_iter().map(|part| one(part, scope)).collect()
}

fn one(text: &str, scope: &Scope<'_>) -> Result<Operand, String> {
    if let Some(inner) = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')) {
        return inner
            .split(',')
            .map(|part| one(part.trim(), scope))
            .collect::<Result<_, _>>()
            .map(Operand::Vector);
    }
    if let Some(inner) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
        return memory(inner.trim(), scope);
    }
    if let Some(special) = special(text) {
        return Ok(Operand::Special(special));
    }
    if text == "_" {
        return Ok(Operand::Sink);
    }
    if let Some(name) = text.strip_prefix('!') {
        return match scope.register(name)? {
            Operand::Pred(pred) => Ok(Operand::NotPred(pred)),
            _ => Err(format!("{name} is not a predicate")),
        };
    }
    if text.starts_with('%') {
        return scope.register(text);
    }
    if text.starts_with('$') {
        return scope.label(text).map(Operand::Label);
    }
    if let Some(address) = scope.shared(text) {
        return Ok(Operand::Shared(address));
    }
    literal(text).ok_or_else(|| format!("unknown operand {text}"))
}

fn special(text: &str) -> Option<Special> {
    Some(match text {
        "%tid.x" => Special::Tid,
        "%laneid" => Special::LaneId,
        "%ntid.x" => Special::Ntid,
        "%ctaid.x" => Special::Ctaid(0),
        "%ctaid.y" => Special::Ctaid(1),
        "%ctaid.z" => Special::Ctaid(2),
        "%nctaid.x" => Special::Nctaid(0),
        "%nctaid.y" => Special::Nctaid(1),
        "%nctaid.z" => Special::Nctaid(2),
        _ => return None,
    })
}

fn literal(text: &str) -> Option<Operand> {
    if let Some(hex) = text.strip_prefix("0f") {
        return u32::from_str_radix(hex, 16).ok().filter(|_| hex.len() == 8).map(Operand::Float32);
    }
    if let Some(hex) = text.strip_prefix("0d") {
        return u64::from_str_radix(hex, 16).ok().filter(|_| hex.len() == 16).map(Operand::Float64);
    }
    if let Some(hex) = text.strip_prefix("0x") {
        // A trailing U says unsigned, which a literal in hexadecimal is anyway.
        let hex = hex.strip_suffix('U').unwrap_or(hex);
        return u64::from_str_radix(hex, 16).ok().map(|value| Operand::Int(value.into()));
    }
    // A leading zero would make it octal.
    let decimal = text.strip_prefix('-').unwrap_or(text);
    let plain = decimal == "0" || !decimal.starts_with('0');
    text.parse::<i128>().ok().filter(|_| plain).map(Operand::Int)
}

/// What stands in brackets: a parameter, or a base with an optional `+ offset`.
fn memory(inner: &str, scope: &Scope<'_>) -> Result<Operand, String> {
    if let Some(param) = scope.param(inner) {
        return Ok(Operand::Param { offset: param.offset, bytes: param.ty.bytes() });
    }
    let (base, offset) = inner.split_once('+').unwrap_or((inner, "0"));
    let offset = match literal(offset.trim()) {
        Some(Operand::Int(offset)) => i64::try_from(offset).ok(),
        _ => None,
    };
    let offset = offset.ok_or_else(|| format!("unknown offset in [{inner}]"))?;
    let base = one(base.trim(), scope)?;
    match base {
        Operand::Reg { .. } | Operand::Shared(_) => {
            Ok(Operand::Memory { base: Box::new(base), offset })
        }
        _ => Err(format!("unknown address [{inner}]")),
    }
}

impl Operand {
    /// A destination register of exactly `bits`.
    pub fn dst(&self, bits: u32) -> Result<Reg, String> {
        self.dst_at_least(bits).and_then(|(reg, found)| {
            if found == bits {
                Ok(reg)
            } else {
                Err(format!("a register of {bits} bits is needed, this one has {found}"))
            }
        })
    }

    /// A destination register of `bits` or more, and its width.
    pub fn dst_at_least(&self, bits: u32) -> Result<(Reg, u32), String> {
        match *self {
            Operand::Reg { reg, bits: found } if found >= bits => Ok((reg, found)),
            Operand::Reg { bits: found, .. } => {
                Err(format!("a register of {bits} bits is needed, this one has {found}"))
            }
            _ => Err(format!("a destination register of {bits} bits is needed, not {self:?}")),
        }
    }

    /// A predicate to write.
    pub fn pred(&self) -> Result<Pred, String> {
        match *self {
            Operand::Pred(pred) => Ok(pred),
            _ => Err(format!("a predicate is needed, not {self:?}")),
        }
    }

    /// A predicate or an integer to read as one.
    pub fn pred_src(&self) -> Result<PredSrc, String> {
        match *self {
            Operand::Pred(pred) => Ok(PredSrc::Reg(pred)),
            Operand::Int(value) => Ok(PredSrc::Const(value != 0)),
            _ => Err(format!("a predicate is needed, not {self:?}")),
        }
    }

    /// A register of the class's width or a literal of its kind.
    pub fn src(&self, shape: Shape, scope: &mut Scope<'_>) -> Result<Src, String> {
        match *self {
            Operand::Reg { reg, bits } if bits == shape.bits => Ok(Src::Reg(reg)),
            Operand::Reg { bits, .. } => {
                Err(format!("a register of {} bits is needed, this one has {bits}", shape.bits))
            }
            Operand::Float32(bits) if shape.float && shape.bits == 32 => {
                Ok(scope.constant(bits.into()))
            }
            Operand::Float64(bits) if shape.float && shape.bits == 64 => Ok(scope.constant(bits)),
            Operand::Int(value) if !shape.float => Ok(scope.constant(fit(value, shape.bits)?)),
            _ => Err(format!(
                "a register or {} literal of {} bits is needed, not {self:?}",
                if shape.float { "float" } else { "integer" },
                shape.bits
            )),
        }
    }

    /// A register or literal of any kind with `bits`: what `mov`, `selp` and stores take.
    pub fn raw(&self, bits: u32, scope: &mut Scope<'_>) -> Result<Src, String> {
        match *self {
            Operand::Shared(address) if bits == 32 => Ok(scope.constant(address)),
            Operand::Float32(_) | Operand::Float64(_) => {
                self.src(Shape { bits, float: true }, scope)
            }
            _ => self.src(Shape { bits, float: false }, scope),
        }
    }

    /// The elements of a vector, or the operand alone.
    pub fn elements(&self) -> &[Operand] {
        match self {
            Operand::Vector(elements) => elements,
            _ => std::slice::from_ref(self),
        }
    }

    /// An integer literal.
    pub fn int(&self) -> Result<u64, String> {
        match *self {
            Operand::Int(value) => fit(value, 64),
            _ => Err(format!("an integer literal is needed, not {self:?}")),
        }
    }

    /// A literal mask of lanes.
    pub fn lane_mask(&self) -> Result<u32, String> {
        match *self {
            Operand::Int(value) => fit(value, 32).map(|mask| mask as u32),
            _ => Err(format!("a literal member mask is needed, not {self:?}")),
        }
    }

    /// An address whose base has `bits`.
    pub fn address(&self, bits: u32, scope: &mut Scope<'_>) -> Result<Address, String> {
        match self {
            Operand::Memory { base, offset } => {
                Ok(Address { base: base.raw(bits, scope)?, offset: *offset })
            }
            _ => Err(format!("an address is needed, not {self:?}")),
        }
    }
}

/// The low `bits` of a literal, which must be a value of that width, signed or unsigned.
fn fit(value: i128, bits: u32) -> Result<u64, String> {
    if value < -(1 << (bits - 1)) || value >= 1 << bits {
        return Err(format!("the literal {value} does not fit in {bits} bits"));
    }
    Ok((value & ((1 << bits) - 1)) as u64)
}
