//! Instructions of a whole warp or block: `mma`, `shfl`, `vote`, `redux`, `bar`.

use super::body::Scope;
use super::decode::exactly;
use super::operand::Operand;
use crate::program::{MmaType, Op, ShuffleMode, Src, VoteMode};

pub(super) fn decode(
    opcode: &str,
    operands: &[Operand],
    scope: &mut Scope<'_>,
) -> Result<Option<Op>, String> {
    match opcode {
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" => {
            mma(MmaType::Bf16, operands, scope)
        }
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" => mma(MmaType::F16, operands, scope),
        "shfl.sync.bfly.b32" => shuffle(ShuffleMode::Butterfly, operands, scope),
        "shfl.sync.idx.b32" => shuffle(ShuffleMode::Index, operands, scope),
        "shfl.sync.up.b32" => shuffle(ShuffleMode::Up, operands, scope),
        "shfl.sync.down.b32" => shuffle(ShuffleMode::Down, operands, scope),
        "vote.sync.all.pred" => vote(VoteMode::All, operands),
        "vote.sync.any.pred" => vote(VoteMode::Any, operands),
        "vote.sync.ballot.b32" => ballot(operands),
        "redux.sync.add.s32" | "redux.sync.add.u32" => reduce(u32::wrapping_add, operands, scope),
        "redux.sync.min.u32" => reduce(u32::min, operands, scope),
        "redux.sync.max.u32" => reduce(u32::max, operands, scope),
        "redux.sync.min.s32" => reduce(|a, b| (a as i32).min(b as i32) as u32, operands, scope),
        "redux.sync.max.s32" => reduce(|a, b| (a as i32).max(b as i32) as u32, operands, scope),
        "bar.sync" => match exactly(operands)? {
            [Operand::Int(0)] => Ok(Some(Op::Barrier)),
            [other] => Err(format!("only barrier 0 is supported, not {other:?}")),
        },
        "bar.warp.sync" => {
            let [members] = exactly(operands)?;
            Ok(Some(Op::WarpBarrier { members: members.lane_mask()? }))
        }
        _ => Ok(None),
    }
}

/// The `N` registers of a fragment.
fn fragment<const N: usize>(
    operand: &Operand,
    float: bool,
    scope: &mut Scope<'_>,
) -> Result<[Src; N], String> {
    let elements: &[Operand; N] = exactly(operand.elements())?;
    let mut srcs = [Src::Const(0); N];
    for (src, element) in srcs.iter_mut().zip(elements) {
        *src = element.src(crate::alu::Shape { bits: 32, float }, scope)?;
    }
    Ok(srcs)
}

fn mma(ty: MmaType, operands: &[Operand], scope: &mut Scope<'_>) -> Result<Option<Op>, String> {
    let [d, a, b, c] = exactly(operands)?;
    let [d0, d1, d2, d3]: &[Operand; 4] = exactly(d.elements())?;
    Ok(Some(Op::Mma {
        ty,
        d: [d0.dst(32)?, d1.dst(32)?, d2.dst(32)?, d3.dst(32)?],
        a: fragment(a, false, scope)?,
        b: fragment(b, false, scope)?,
        c: fragment(c, true, scope)?,
    }))
}

fn shuffle(
    mode: ShuffleMode,
    operands: &[Operand],
    scope: &mut Scope<'_>,
) -> Result<Option<Op>, String> {
    let [dst, value, lane, clamp, members] = exactly(operands)?;
    Ok(Some(Op::Shuffle {
        mode,
        dst: dst.dst(32)?,
        value: value.raw(32, scope)?,
        lane: lane.raw(32, scope)?,
        clamp: clamp.raw(32, scope)?,
        members: members.lane_mask()?,
    }))
}

/// A predicate, negated or not.
fn voter(operand: &Operand) -> Result<(crate::program::Pred, bool), String> {
    match *operand {
        Operand::NotPred(pred) => Ok((pred, true)),
        _ => operand.pred().map(|pred| (pred, false)),
    }
}

fn vote(mode: VoteMode, operands: &[Operand]) -> Result<Option<Op>, String> {
    let [dst, src, members] = exactly(operands)?;
    let (src, negated) = voter(src)?;
    let (dst, members) = (dst.pred()?, members.lane_mask()?);
    Ok(Some(Op::Vote { mode, dst, src, negated, members }))
}

fn ballot(operands: &[Operand]) -> Result<Option<Op>, String> {
    let [dst, src, members] = exactly(operands)?;
    let (src, negated) = voter(src)?;
    Ok(Some(Op::Ballot { dst: dst.dst(32)?, src, negated, members: members.lane_mask()? }))
}

fn reduce(
    f: fn(u32, u32) -> u32,
    operands: &[Operand],
    scope: &mut Scope<'_>,
) -> Result<Option<Op>, String> {
    let [dst, src, members] = exactly(operands)?;
    let (src, members) = (src.raw(32, scope)?, members.raw(32, scope)?);
    Ok(Some(Op::Reduce { f, dst: dst.dst(32)?, src, members }))
}
