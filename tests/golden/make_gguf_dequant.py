#!/usr/bin/env python3
"""Record what the gguf package reads in blocks of each GGUF type.

The file, tests/data/gguf-dequant.safetensors, has two tensors a type:

  TYPE.bytes  [n, bytes of a block] uint8       random bytes, as a file would hold them
  TYPE.f32    [n, values of a block] float32    what they stand for

Blocks with a value that is not finite (a scale that happens to be infinity or NaN) are drawn again.
A reader agrees bit for bit: every product is rounded to float32, in ggml's order.

    python -m venv .venv
    .venv/bin/pip install gguf==0.19.0 safetensors==0.8.0
    .venv/bin/python tests/golden/make_gguf_dequant.py --out tests/data/gguf-dequant.safetensors
"""

import argparse
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.numpy import save_file

# Floats have one value a block, so they get more blocks.
FLOATS = ("F16", "BF16")
QUANTISED = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
COUNTS = dict.fromkeys(FLOATS, 256) | dict.fromkeys(QUANTISED, 64)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path, help="file to write")
    parser.add_argument("--seed", type=int, default=0, help="of the bytes (default: 0)")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    tensors = {}
    for name, count in COUNTS.items():
        tensors[f"{name}.bytes"], tensors[f"{name}.f32"] = blocks(name, count, rng)
    save_file(tensors, args.out)


def blocks(name, count, rng):
    """`count` random blocks of finite values: their bytes, and the values."""
    kind = GGMLQuantizationType[name]
    values_per_block, bytes_per_block = GGML_QUANT_SIZES[kind]
    # Few blocks are dropped; twice as many are more than enough.
    data = rng.integers(256, size=(2 * count, bytes_per_block), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = dequantize(data, kind).reshape(-1, values_per_block)
    finite = np.isfinite(values).all(axis=1)
    data, values = data[finite][:count], values[finite][:count]
    assert len(data) == count, f"{name}: {len(data)} blocks are finite"
    return data, np.ascontiguousarray(values, dtype=np.float32)


if __name__ == "__main__":
    main()
