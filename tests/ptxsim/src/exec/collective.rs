//! Instructions in which lanes work together: `mma`, `shfl`, `vote`, `redux`.

use half::f16;

use super::registers::{PredValue, Registers};
use super::warp::Context;
use super::{LaneFault, lanes};
use crate::alu::{LANES, Lanes};
use crate::error::FaultKind;
use crate::program::{MmaType, Op, ShuffleMode, VoteMode};

/// FLOPs of m16n8k16.
const MMA_FLOPS: u64 = 2 * 16 * 8 * 16;

/// All lanes of the warp take part.
pub(super) fn check_whole(mask: u32) -> Result<(), LaneFault> {
    check_members(!0, mask)
}

/// The lanes here are the ones that the member mask names.
pub(super) fn check_members(members: u32, mask: u32) -> Result<(), LaneFault> {
    if mask == members {
        Ok(())
    } else {
        Err(LaneFault::warp(FaultKind::PartialWarp { lanes: mask }))
    }
}

/// `mma.m16n8k16`: D = A·B + C with A of 16 × 16, B of 16 × 8, C and D of 16 × 8.
///
/// With g = lane / 4 and t = lane % 4, a lane holds two elements in each register of A and B and
/// one in each of C and D:
///
/// ```text
/// A: registers 0, 1, 2, 3 = rows g, g+8, g, g+8, columns 2t and 2t+1, plus 8 in registers 2, 3
/// B: registers 0, 1       = rows 2t and 2t+1, plus 8 in register 1, column g
/// C: registers 0, 1, 2, 3 = row g, g, g+8, g+8, column 2t, 2t+1, 2t, 2t+1
/// ```
///
/// Products of two narrow floats are exact in f32; the sum starts from C and takes k in ascending
/// order, rounding each time. Hardware sums in another, undocumented way.
pub(super) fn mma(
    r: &mut Registers,
    op: &Op,
    mask: u32,
    context: &mut Context<'_, '_>,
) -> Result<(), LaneFault> {
    let Op::Mma { ty, d, a, b, c } = *op else { unreachable!("{op:?}") };
    check_whole(mask)?;
    let kernel = context.machine.kernel;
    let widen = match ty {
        MmaType::Bf16 => |bits: u16| f32::from_bits(u32::from(bits) << 16),
        MmaType::F16 => |bits: u16| f16::from_bits(bits).to_f32(),
    };
    let halves = |value: u64| (widen(value as u16), widen((value >> 16) as u16));
    let (mut left, mut right, mut sum) = ([[0f32; 16]; 16], [[0f32; 8]; 16], [[0f32; 8]; 16]);
    for (q, &src) in a.iter().enumerate() {
        for (lane, &value) in r.value(kernel, src).iter().enumerate() {
            let (row, k) = (lane / 4 + 8 * (q & 1), 2 * (lane % 4) + 8 * (q >> 1));
            (left[row][k], left[row][k + 1]) = halves(value);
        }
    }
    for (q, &src) in b.iter().enumerate() {
        for (lane, &value) in r.value(kernel, src).iter().enumerate() {
            let (k, column) = (2 * (lane % 4) + 8 * q, lane / 4);
            (right[k][column], right[k + 1][column]) = halves(value);
        }
    }
    for (q, &src) in c.iter().enumerate() {
        for (lane, &value) in r.value(kernel, src).iter().enumerate() {
            sum[lane / 4 + 8 * (q >> 1)][2 * (lane % 4) + (q & 1)] = f32::from_bits(value as u32);
        }
    }
    for (sum, left) in sum.iter_mut().zip(&left) {
        for (&x, right) in left.iter().zip(&right) {
            sum.iter_mut().zip(right).for_each(|(sum, y)| *sum += x * y);
        }
    }
    let undefined = mma_undefined(
        a.map(|src| r.undefined(src)),
        b.map(|src| r.undefined(src)),
        c.map(|src| r.undefined(src)),
    );
    for (q, &dst) in d.iter().enumerate() {
        let value = |lane: usize| {
            let value = sum[lane / 4 + 8 * (q >> 1)][2 * (lane % 4) + (q & 1)];
            u64::from(if value.is_nan() { 0x7fff_ffff } else { value.to_bits() })
        };
        r.write(dst, !0, &std::array::from_fn(value), undefined[q]);
    }
    context.machine.profile.flops += MMA_FLOPS;
    Ok(())
}

/// Lanes of each register of D that are undefined: those of an undefined row of A, column of B or
/// element of C.
fn mma_undefined(a: [u32; 4], b: [u32; 2], c: [u32; 4]) -> [u32; 4] {
    if a.iter().chain(&b).all(|&lanes| lanes == 0) {
        return c;
    }
    // Row g of the upper or lower half of A is held by lanes 4g … 4g+3, as is column g of B.
    let quads = |lanes: u32| {
        (0..8).filter(|g| lanes >> (4 * g) & 15 != 0).fold(0, |set, g| set | 15u32 << (4 * g))
    };
    let rows = [quads(a[0] | a[2]), quads(a[1] | a[3])];
    let columns = b[0] | b[1];
    let column = |n: usize| columns >> (4 * n) & 15 != 0;
    std::array::from_fn(|q| {
        let by_column = (0..LANES)
            .filter(|lane| column(2 * (lane % 4) + (q & 1)))
            .fold(0, |set, lane| set | 1 << lane);
        c[q] | rows[q >> 1] | by_column
    })
}

/// `shfl.sync`, as in the pseudo-code of the PTX ISA.
pub(super) fn shuffle(
    r: &mut Registers,
    op: &Op,
    mask: u32,
    context: &mut Context<'_, '_>,
) -> Result<(), LaneFault> {
    let Op::Shuffle { mode, dst, value, lane, clamp, members } = *op else {
        unreachable!("{op:?}")
    };
    check_members(members, mask)?;
    let kernel = context.machine.kernel;
    let operand = r.defined(kernel, lane, mask, "lane of the shuffle")?;
    let clamp = r.defined(kernel, clamp, mask, "clamp of the shuffle")?;
    let (values, undefined) = (*r.value(kernel, value), r.undefined(value));
    let (mut out, mut out_undefined): (Lanes, u32) = ([0; LANES], 0);
    for lane in lanes(mask) {
        let from = source_lane(mode, lane, operand[lane] as usize & 31, clamp[lane] as usize);
        if mask >> from & 1 == 0 {
            return Err(LaneFault::at(lane)(FaultKind::Shuffle { from, lanes: mask }));
        }
        out[lane] = values[from];
        out_undefined |= (undefined >> from & 1) << lane;
    }
    r.write(dst, mask, &out, out_undefined);
    Ok(())
}

/// The lane that `lane` reads: itself where the other is outside of its segment.
fn source_lane(mode: ShuffleMode, lane: usize, operand: usize, clamp: usize) -> usize {
    let (segment, clamp) = (clamp >> 8 & 31, clamp & 31);
    let first = lane & segment;
    let last = first | clamp & !segment;
    let (from, inside) = match mode {
        ShuffleMode::Up => (lane.wrapping_sub(operand), lane >= last + operand),
        ShuffleMode::Down => (lane + operand, lane + operand <= last),
        ShuffleMode::Butterfly => (lane ^ operand, lane ^ operand <= last),
        ShuffleMode::Index => {
            let from = first | operand & !segment;
            (from, from <= last)
        }
    };
    if inside { from } else { lane }
}

/// `vote.sync`.
pub(super) fn vote(r: &mut Registers, op: &Op, mask: u32) -> Result<(), LaneFault> {
    match *op {
        Op::Vote { mode, dst, src, negated, members } => {
            check_members(members, mask)?;
            let votes = r.decided(src, negated, mask, "vote")?;
            let result = match mode {
                VoteMode::All => votes == mask,
                VoteMode::Any => votes != 0,
            };
            let value = if result { !0 } else { 0 };
            r.write_pred(dst, mask, PredValue { value, undefined: 0 });
        }
        Op::Ballot { dst, src, negated, members } => {
            check_members(members, mask)?;
            let votes = r.decided(src, negated, mask, "vote")?;
            r.write(dst, mask, &[votes.into(); LANES], 0);
        }
        ref other => unreachable!("{other:?} is dispatched elsewhere"),
    }
    Ok(())
}

/// `redux.sync`: the same value in all lanes, undefined where one of theirs is.
pub(super) fn reduce(
    r: &mut Registers,
    op: &Op,
    mask: u32,
    context: &mut Context<'_, '_>,
) -> Result<(), LaneFault> {
    let Op::Reduce { f, dst, src, members } = *op else { unreachable!("{op:?}") };
    let kernel = context.machine.kernel;
    let members = r.defined(kernel, members, mask, "member mask")?;
    lanes(mask).try_for_each(|lane| check_members(members[lane] as u32, mask))?;
    let values = r.value(kernel, src);
    let result = lanes(mask).map(|lane| values[lane] as u32).reduce(f).unwrap_or(0);
    let undefined = if r.undefined(src) & mask == 0 { 0 } else { mask };
    r.write(dst, mask, &[result.into(); LANES], undefined);
    Ok(())
}
