#!/usr/bin/env python3
"""Record rotary frequencies and attention factors with Hugging Face transformers.

Each case is a config as published (keys of config.json), the length of the longest sequence, and
what transformers computes for them. Dynamic scaling is asked for a sequence of `factor` times
`max_position_embeddings`, the one length this project computes it for.

    python make_rope_goldens.py > ../data/rope-goldens.json

Needs transformers 5 and torch.
"""

import json
import math

import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HEAD_DIM = 64


def config(theta, context, head_dim=HEAD_DIM, **scaling):
    """The keys of a config.json that concern rope."""
    return {
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def ramp(first, last, count=HEAD_DIM // 2):
    return [round(first + (last - first) * i / (count - 1), 4) for i in range(count)]


def longrope(theta, context, original, **scaling):
    keys = config(theta, context, rope_type="longrope", **scaling)
    keys["rope_scaling"] |= {"short_factor": ramp(1.0, 2.5), "long_factor": ramp(1.0, 60.0)}
    # Phi-3 keeps the original length beside the scaling, others within it.
    if scaling.get("factor") is None:
        return keys | {"original_max_position_embeddings": original}
    keys["rope_scaling"]["original_max_position_embeddings"] = original
    return keys


def llama3(theta, head_dim, factor, low, high, original):
    return config(
        theta,
        131072,
        head_dim,
        rope_type="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def yarn(theta, context, head_dim=HEAD_DIM, **scaling):
    return config(theta, context, head_dim, rope_type="yarn", **scaling)


CASES = [
    ("linear by 4", config(10000.0, 4096, rope_type="linear", factor=4.0)),
    ("linear by 2.5", config(100000.0, 16384, 128, rope_type="linear", factor=2.5)),
    ("linear by 1", config(500000.0, 2048, 96, rope_type="linear", factor=1.0)),
    ("dynamic by 2", config(10000.0, 2048, rope_type="dynamic", factor=2.0)),
    ("dynamic by 4", config(1000000.0, 4096, 128, rope_type="dynamic", factor=4.0)),
    ("dynamic by 1.5", config(10000.0, 8192, 32, rope_type="dynamic", factor=1.5)),
    ("llama 3.1", llama3(500000.0, 128, 8.0, 1.0, 4.0, 8192)),
    ("llama 3.2", llama3(500000.0, 64, 32.0, 1.0, 4.0, 8192)),
    ("llama3, narrow ramp", llama3(10000.0, 64, 2.0, 2.0, 2.5, 256)),
    (
        "yarn, qwen2.5",
        yarn(1000000.0, 32768, 128, factor=4.0, original_max_position_embeddings=32768),
    ),
    (
        "yarn, betas and attention factor",
        yarn(
            10000.0,
            65536,
            factor=16.0,
            original_max_position_embeddings=4096,
            beta_fast=64.0,
            beta_slow=2.0,
            attention_factor=1.5,
        ),
    ),
    (
        "yarn, mscale",
        yarn(
            10000.0,
            163840,
            factor=40.0,
            original_max_position_embeddings=4096,
            mscale=1.0,
            mscale_all_dim=0.707,
        ),
    ),
    (
        "yarn, not truncated",
        yarn(
            150000.0,
            131072,
            factor=32.0,
            original_max_position_embeddings=4096,
            truncate=False,
        ),
    ),
    ("yarn, short original", yarn(10000.0, 64, factor=2.0, original_max_position_embeddings=4)),
    ("longrope, long", longrope(10000.0, 131072, 4096)),
    ("longrope, short", longrope(10000.0, 131072, 4096)),
    ("longrope, factor", longrope(10000.0, 65536, 32768, factor=8.0)),
    ("longrope, attention factor", longrope(50000.0, 65536, 8192, factor=8.0, attention_factor=1.2)),
]


def context_len(name, keys):
    if name == "longrope, short":
        return 4096
    scaling = keys["rope_scaling"]
    if scaling["rope_type"] == "dynamic":
        return math.floor(keys["max_position_embeddings"] * scaling["factor"])
    return keys["max_position_embeddings"]


def record(name, keys):
    length = context_len(name, keys)
    # A copy: transformers adds keys to the scaling it is given.
    model = LlamaConfig(hidden_size=256, num_attention_heads=4, **json.loads(json.dumps(keys)))
    compute = ROPE_INIT_FUNCTIONS[keys["rope_scaling"]["rope_type"]]
    inv_freq, attention_factor = compute(model, "cpu", seq_len=length)
    return {
        "name": name,
        "config": keys,
        "context_len": length,
        "attention_factor": float(attention_factor),
        "inv_freq": inv_freq.double().tolist(),
    }


def main():
    cases = [record(name, keys) for name, keys in CASES]
    print(json.dumps({"transformers": transformers.__version__, "cases": cases}, indent=1))


if __name__ == "__main__":
    main()
