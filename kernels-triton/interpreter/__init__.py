"""Runs the kernels in Triton's interpreter (`TRITON_INTERPRET=1`) on numpy arrays, without torch.

`Tensor` is what tests pass to a kernel; `repair()` mends what the interpreter of Triton 3.9 gets
wrong in silence and makes it check every address. `conftest.py` calls it before any test.
"""

from interpreter.repair import repair
from interpreter.tensor import Tensor, bf16_bits, bf16_round, bf16_value

__all__ = ["Tensor", "bf16_bits", "bf16_round", "bf16_value", "repair"]
