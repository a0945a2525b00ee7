"""Mends Triton 3.9's interpreter, which is wrong in silence in these ways:

- bf16 is kept as uint16 and its arithmetic, comparisons and dots run on those integers; the
  conversion from f32 truncates. Here both sides are widened to f32, and results are rounded to
  nearest even, as the hardware does.
- `tl.dot` uses BLAS, whose order of addition depends on the shape. Here products are added in the
  order of K, one rounding a step, so that a row's bits do not depend on the tile it is in.
- A load or store outside every tensor reads or writes the process's memory. Here it is an error.
- A comparison's result keeps its operands' type, so that a scalar one, splat, is no mask.
- Sums over bf16 tensors add integers: an error here; kernels sum in f32.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from interpreter.tensor import LIVE, bf16_bits, bf16_value

TensorHandle = interpreter.TensorHandle
COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
BITWISE = {np.bitwise_and, np.bitwise_or, np.bitwise_xor}


class AddressError(Exception):
    """A kernel touched memory that no tensor owns."""


def is_bf16(handle: TensorHandle) -> bool:
    """Whether its elements are bf16."""
    return handle.dtype.scalar == tl.bfloat16


def widen(handle: TensorHandle) -> TensorHandle:
    """bf16 → f32; anything else as it is."""
    return TensorHandle(bf16_value(handle.data), tl.float32) if is_bf16(handle) else handle


def narrow(values: np.ndarray) -> TensorHandle:
    """f32 values → bf16."""
    return TensorHandle(bf16_bits(values), tl.bfloat16)


def ordered_dot(a: np.ndarray, b: np.ndarray, acc: np.ndarray) -> np.ndarray:
    """acc + a·b, one k after the other. a [M, K], b [K, N], acc [M, N]."""
    acc = np.array(acc, np.float32)
    a, b = a.astype(np.float32), b.astype(np.float32)
    for k in range(a.shape[1]):
        acc += a[:, k, None] * b[k, None, :]
    return acc


def check_addresses(what: str, pointers: TensorHandle, mask: np.ndarray) -> None:
    """Raises unless every address under the mask lies in one tensor and is aligned."""
    width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    where = np.broadcast_to(mask, pointers.data.shape)
    addresses = pointers.data[where]
    if addresses.size == 0:
        return
    starts = np.array(sorted(LIVE), np.uint64)
    ends = np.array([start + LIVE[start].array.nbytes for start in sorted(LIVE)], np.uint64)
    owner = np.searchsorted(starts, addresses, side="right")
    outside = (owner == 0) | (addresses + np.uint64(width) > ends[np.maximum(owner, 1) - 1])
    if outside.any() or (addresses % np.uint64(width)).any():
        lanes = np.argwhere(where)[outside]
        raise AddressError(f"{what} of {width} bytes outside every tensor, or misaligned, at "
                           f"elements {lanes[:4].tolist()} of a block of shape {where.shape}")


def repair() -> None:
    """Patches the interpreter; calling it again changes nothing."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "repaired", False):
        return
    builder.repaired = True
    repair_arithmetic(builder)
    repair_memory(builder)
    plain_sum = interpreter.ReduceOps.sum

    def checked_sum(self, values):
        assert values.dtype.scalar != tl.bfloat16, "sum over bf16: convert to float32 first"
        return plain_sum(self, values)

    interpreter.ReduceOps.sum = checked_sum


def repair_arithmetic(builder: type) -> None:
    """bf16 conversions and arithmetic, and dots in the order of K."""
    plain_cast, plain_binary = builder.cast_impl, builder.binary_op
    plain_unary, plain_fp_to_fp = builder.unary_op, builder.create_fp_to_fp
    plain_fma = builder.create_fma

    def cast(self, source, target):
        if is_bf16(source) and target.scalar != tl.bfloat16:
            wide = widen(source)
            return wide if target.scalar == tl.float32 else plain_cast(self, wide, target)
        if target.scalar == tl.bfloat16 and not is_bf16(source):
            return narrow(plain_cast(self, source, tl.float32).data)
        return plain_cast(self, source, target)

    def fp_to_fp(self, source, target, rounding):
        if is_bf16(source) or target.scalar == tl.bfloat16:
            return cast(self, source, target)
        # numpy rounds to nearest even; the interpreter's own conversion does not handle ties.
        if {source.dtype.scalar, target.scalar} <= {tl.float16, tl.float32, tl.float64}:
            return plain_cast(self, source, target)
        return plain_fp_to_fp(self, source, target, rounding)

    def binary(self, left, right, operation):
        if is_bf16(left) and is_bf16(right) and operation not in BITWISE:
            result = operation(widen(left).data, widen(right).data)
            return TensorHandle(result, tl.int1) if operation in COMPARISONS else narrow(result)
        if operation in COMPARISONS:
            return TensorHandle(operation(left.data, right.data), tl.int1)
        return plain_binary(self, left, right, operation)

    def unary(self, operand, operation):
        if is_bf16(operand):
            return narrow(operation(widen(operand).data))
        return plain_unary(self, operand, operation)

    def fma(self, x, y, z):
        if is_bf16(z):
            return narrow(widen(x).data * widen(y).data + widen(z).data)
        return plain_fma(self, x, y, z)

    def dot(self, a, b, acc, _precision, _imprecise):
        values = ordered_dot(widen(a).data, widen(b).data, acc.data)
        return TensorHandle(values, acc.dtype.scalar)

    builder.cast_impl, builder.create_fp_to_fp = cast, fp_to_fp
    builder.binary_op, builder.unary_op = binary, unary
    builder.create_fma, builder.create_dot = fma, dot


def repair_memory(builder: type) -> None:
    """Every load and store is checked against the live tensors."""
    plain_load, plain_store = builder.create_masked_load, builder.create_masked_store

    def load(self, pointers, mask, other, policy, volatile):
        check_addresses("load", pointers, mask.data)
        return plain_load(self, pointers, mask, other, policy, volatile)

    def store(self, pointers, value, mask, policy):
        check_addresses("store", pointers, mask.data)
        return plain_store(self, pointers, value, mask, policy)

    builder.create_masked_load, builder.create_masked_store = load, store
