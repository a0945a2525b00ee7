//! Instructions that stay within a lane and touch no memory. None of them can fail; undefined
//! sources make undefined results.

use super::registers::{PredValue, Registers};
use super::warp::{Context, coordinates, thread_ids};
use crate::alu::{self, Alu, LANES, Lanes};
use crate::program::{Element, Kernel, Op, PredOp, Reg, Special, Src};

pub(super) fn execute(r: &mut Registers, op: &Op, mask: u32, context: &mut Context<'_, '_>) {
    let kernel = context.machine.kernel;
    match *op {
        Op::Alu { ref alu, dst, srcs } => {
            context.machine.profile.flops += u64::from(alu.flops * mask.count_ones());
            alu_op(r, kernel, alu, (dst, srcs), mask);
        }
        Op::Lop3 { dst, srcs, table } => {
            let [a, b, c] = srcs.map(|src| r.value(kernel, src));
            let out = std::array::from_fn(|lane| alu::lop3(a[lane], b[lane], c[lane], table));
            let undefined = srcs.map(|src| r.undefined(src)).iter().fold(0, |x, y| x | y);
            r.write(dst, mask, &out, undefined);
        }
        Op::Move { dst, src } => {
            let (value, undefined) = (*r.value(kernel, src), r.undefined(src));
            r.write(dst, mask, &value, undefined);
        }
        Op::MoveSpecial { dst, special } => {
            r.write(dst, mask, &special_value(special, context), 0);
        }
        Op::Pack { dst, ref parts, bits } => {
            let (mut out, mut undefined) = ([0; LANES], 0);
            for (i, &part) in parts.iter().enumerate() {
                let value = r.value(kernel, part);
                out.iter_mut().zip(value).for_each(|(o, v)| *o |= v << (i as u32 * bits));
                undefined |= r.undefined(part);
            }
            r.write(dst, mask, &out, undefined);
        }
        Op::Unpack { src, ref parts, bits } => {
            let (value, undefined) = (*r.value(kernel, src), r.undefined(src));
            let low = (1u64 << bits) - 1;
            for (i, part) in parts.iter().enumerate() {
                let out = value.map(|value| value >> (i as u32 * bits) & low);
                part.iter().for_each(|&dst| r.write(dst, mask, &out, undefined));
            }
        }
        Op::Select { dst, yes, no, pred } => {
            let pred = r.pred(pred);
            let (a, b) = (r.value(kernel, yes), r.value(kernel, no));
            let pick = |lane: usize| if pred.value >> lane & 1 == 1 { a[lane] } else { b[lane] };
            let out = std::array::from_fn(pick);
            let taken = r.undefined(yes) & pred.value | r.undefined(no) & !pred.value;
            r.write(dst, mask, &out, pred.undefined | taken);
        }
        Op::LoadParam { dst, offset, element, dst_bits } => {
            let bytes = &context.machine.params[offset..][..element.bytes];
            r.write(dst, mask, &[read_element(bytes, element, dst_bits); LANES], 0);
        }
        _ => predicate(r, op, mask, kernel),
    }
}

fn alu_op(r: &mut Registers, kernel: &Kernel, alu: &Alu, (dst, srcs): (Reg, [Src; 3]), mask: u32) {
    let values = srcs.map(|src| r.value(kernel, src));
    let mut out = [0; LANES];
    (alu.eval)(values, &mut out);
    let mut undefined = r.undefined(srcs[0]) | r.undefined(srcs[1]) | r.undefined(srcs[2]);
    if alu.zero_undefined {
        let zero = |lane: &usize| values[1][*lane] == 0;
        undefined |= (0..LANES).filter(zero).fold(0, |lanes, lane| lanes | 1 << lane);
    }
    r.write(dst, mask, &out, undefined);
}

fn predicate(r: &mut Registers, op: &Op, mask: u32, kernel: &Kernel) {
    match *op {
        Op::SetPred { dst, compare, a, b, with } => {
            let result = PredValue {
                value: (compare.eval)(r.value(kernel, a), r.value(kernel, b)),
                undefined: r.undefined(a) | r.undefined(b),
            };
            let result = match with {
                Some((op, with)) => combine(op, result, r.pred_src(with)),
                None => result,
            };
            r.write_pred(dst, mask, result);
        }
        Op::MovePred { dst, src } => r.write_pred(dst, mask, r.pred_src(src)),
        Op::NotPred { dst, src } => {
            let PredValue { value, undefined } = r.pred(src);
            r.write_pred(dst, mask, PredValue { value: !value, undefined });
        }
        Op::CombinePred { dst, op, a, b } => {
            r.write_pred(dst, mask, combine(op, r.pred_src(a), r.pred_src(b)));
        }
        ref other => unreachable!("{other:?} is dispatched elsewhere"),
    }
}

/// `and` with a defined false is false whatever the other is, and so for `or` with true.
fn combine(op: PredOp, a: PredValue, b: PredValue) -> PredValue {
    let either = a.undefined | b.undefined;
    match op {
        PredOp::And => {
            let decided = !a.value & !a.undefined | !b.value & !b.undefined;
            let undefined = either & !decided;
            PredValue { value: a.value & b.value & !decided, undefined }
        }
        PredOp::Or => {
            let decided = a.value & !a.undefined | b.value & !b.undefined;
            let undefined = either & !decided;
            PredValue { value: a.value | b.value | decided, undefined }
        }
        PredOp::Xor => PredValue { value: a.value ^ b.value, undefined: either },
    }
}

fn special_value(special: Special, context: &Context<'_, '_>) -> Lanes {
    let machine = &context.machine;
    match special {
        Special::Tid => thread_ids(context.warp),
        Special::LaneId => thread_ids(0),
        Special::Ntid => [machine.kernel.threads.into(); LANES],
        Special::Ctaid(axis) => [coordinates(context.block, machine.grid)[axis].into(); LANES],
        Special::Nctaid(axis) => [machine.grid[axis].into(); LANES],
    }
}

/// An element from memory as it stands in a register of `bits`.
pub(super) fn read_element(bytes: &[u8], element: Element, bits: u32) -> u64 {
    // Copies of known sizes are not calls.
    let value = match (element.bytes, bytes) {
        (1, &[a, ..]) => a.into(),
        (2, &[a, b, ..]) => u16::from_le_bytes([a, b]).into(),
        (4, &[a, b, c, d, ..]) => u32::from_le_bytes([a, b, c, d]).into(),
        (8, &[a, b, c, d, e, f, g, h, ..]) => u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        _ => unreachable!("an element of {} in {} bytes", element.bytes, bytes.len()),
    };
    if !element.signed {
        return value;
    }
    let unused = 64 - 8 * element.bytes as u32;
    let extended = (value << unused) as i64 >> unused;
    extended as u64 & (u64::MAX >> (64 - bits))
}
