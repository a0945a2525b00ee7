//! Instructions on predicates.

use super::body::Scope;
use super::decode::exactly;
use super::operand::Operand;
use crate::alu::compare;
use crate::program::{Op, PredOp};

fn operator(name: &str) -> Option<PredOp> {
    match name {
        "and" => Some(PredOp::And),
        "or" => Some(PredOp::Or),
        "xor" => Some(PredOp::Xor),
        _ => None,
    }
}

/// `mov.pred`, `not.pred`, `and.pred`, `or.pred`, `xor.pred`.
pub(super) fn logic(name: &str, operands: &[Operand]) -> Result<Option<Op>, String> {
    Ok(match name {
        "mov" => {
            let [dst, src] = exactly(operands)?;
            Some(Op::MovePred { dst: dst.pred()?, src: src.pred_src()? })
        }
        "not" => {
            let [dst, src] = exactly(operands)?;
            Some(Op::NotPred { dst: dst.pred()?, src: src.pred()? })
        }
        _ => {
            let Some(op) = operator(name) else { return Ok(None) };
            let [dst, a, b] = exactly(operands)?;
            Some(Op::CombinePred { dst: dst.pred()?, op, a: a.pred_src()?, b: b.pred_src()? })
        }
    })
}

/// `selp.TYPE`
pub(super) fn select(
    ty: &str,
    operands: &[Operand],
    scope: &mut Scope<'_>,
) -> Result<Option<Op>, String> {
    let bits = match ty {
        "b16" | "u16" | "s16" => 16,
        "b32" | "u32" | "s32" | "f32" => 32,
        "b64" | "u64" | "s64" | "f64" => 64,
        _ => return Ok(None),
    };
    let [dst, yes, no, pred] = exactly(operands)?;
    let (yes, no) = (yes.raw(bits, scope)?, no.raw(bits, scope)?);
    Ok(Some(Op::Select { dst: dst.dst(bits)?, yes, no, pred: pred.pred()? }))
}

/// `setp.CONDITION[.OPERATOR].TYPE`
pub(super) fn set(
    modifiers: &str,
    operands: &[Operand],
    scope: &mut Scope<'_>,
) -> Result<Option<Op>, String> {
    let (condition, operator, ty) = match modifiers.split('.').collect::<Vec<_>>()[..] {
        [condition, ty] => (condition, None, ty),
        [condition, name, ty] => match operator(name) {
            Some(op) => (condition, Some(op), ty),
            None => return Ok(None),
        },
        _ => return Ok(None),
    };
    let Some(compare) = compare::lookup(condition, ty) else { return Ok(None) };
    let (dst, a, b, with) = match operator {
        None => {
            let [dst, a, b] = exactly(operands)?;
            (dst, a, b, None)
        }
        Some(op) => {
            let [dst, a, b, with] = exactly(operands)?;
            (dst, a, b, Some((op, with.pred_src()?)))
        }
    };
    let (a, b) = (a.src(compare.shape, scope)?, b.src(compare.shape, scope)?);
    Ok(Some(Op::SetPred { dst: dst.pred()?, compare, a, b, with }))
}
