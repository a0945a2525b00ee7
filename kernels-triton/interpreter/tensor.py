"""A numpy array with the handful of methods that Triton's interpreter asks of a tensor."""

import weakref

import numpy as np

# Triton's names of the numpy types; bf16 is kept as its bits in uint16.
NAMES = {"float32": "fp32", "float16": "fp16", "float64": "fp64"}

# Every tensor alive, by address: what `repair` checks loads and stores against.
LIVE: "weakref.WeakValueDictionary[int, Tensor]" = weakref.WeakValueDictionary()


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """f32 → bf16 bits, rounded to nearest even; every NaN becomes 0x7FC0."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    round_up = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    rounded = ((bits.astype(np.uint64) + round_up) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def bf16_value(bits: np.ndarray) -> np.ndarray:
    """bf16 bits → f32, exactly."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_round(values: np.ndarray) -> np.ndarray:
    """f32 → the nearest bf16, as f32."""
    return bf16_value(bf16_bits(values))


class Tensor:
    """Device memory of a kernel under test: `Tensor(array)`, or `Tensor(array, "bf16")` from f32.

    `dtype` may be any of Triton's names; the array is copied, laid out contiguously and aligned to
    16 bytes, as the kernels' pointer hints promise.
    """

    def __init__(self, array: np.ndarray, dtype: str | None = None) -> None:
        array = np.asarray(array)
        if dtype == "bf16" and array.dtype != np.uint16:
            array = bf16_bits(array)
        elif dtype == "fp16":
            array = array.astype(np.float16)
        elif dtype == "fp32":
            array = array.astype(np.float32)
        self.dtype = dtype or NAMES.get(array.dtype.name, array.dtype.name)
        self.array = aligned_copy(array)
        LIVE[self.data_ptr()] = self

    @property
    def f32(self) -> np.ndarray:
        """The values as f32."""
        return bf16_value(self.array) if self.dtype == "bf16" else self.array.astype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return self.array.shape

    # What `triton.runtime.interpreter.GridExecutor` calls. Host and device are one memory here, so
    # the copies it makes are the tensor itself.

    def data_ptr(self) -> int:
        """Address of the first element."""
        return self.array.ctypes.data

    def untyped_storage(self) -> "Tensor":
        """The memory behind the tensor."""
        return self

    def cpu(self) -> "Tensor":
        """The copy in host memory."""
        return self

    def new_empty(self, _size: int, device: str) -> "Tensor":
        """The host's tensor that `set_` will point at the storage."""
        assert device == "cpu"
        return self

    def set_(self, storage: "Tensor", *_layout: object) -> None:
        """Points at `storage`, which it already does."""
        assert storage is self

    def storage_offset(self) -> int:
        """Elements before the first one."""
        return 0

    def size(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        """Elements between neighbours along each axis."""
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def copy_(self, other: "Tensor") -> None:
        """Copies back from the host, where it already is."""
        assert other is self


def aligned_copy(array: np.ndarray, alignment: int = 16) -> np.ndarray:
    """A contiguous copy whose first byte lies at a multiple of `alignment`."""
    raw = np.empty(array.nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    copy = raw[start:start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
