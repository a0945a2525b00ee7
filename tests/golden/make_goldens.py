#!/usr/bin/env python3
"""Make a tiny random model and record its logits with Hugging Face transformers.

The folder that it writes is a model that Quire loads, with what the model must compute:

  config.json, generation_config.json, model.safetensors   as transformers saves them, in float32
  tokenizer.json       copied: one token a byte, then special tokens, 320 in all
  golden.safetensors   for sequences i = 0, 1, … of 1, 5, 17, 40 and 97 random ids
      ids_i          [T] int64        the prompt
      logits_i       [T, V] float32   logits at every position
      greedy_i       [24] int64       the greedy continuation, not stopped by end-of-sequence;
                                      ties go to the lower token id
      logits_bf16_i  [T, V] float32   logits of the same files loaded in bfloat16: how far bfloat16
                                      alone moves them

Norm weights are drawn around 1 and biases around 0, so that a model which leaves one out has other
logits; matrices are scaled to keep activations near 1. Attention is eager, sums are float32.

    python -m venv .venv
    .venv/bin/pip install torch==2.13.0 transformers==5.24.0
    .venv/bin/python tests/golden/make_goldens.py --architecture qwen3 --seed 6 \\
        --out tests/data/goldens/qwen3-tied tie_word_embeddings=true num_attention_heads=3 \\
        num_key_value_heads=1
    target/release/quire verify tests/data/goldens/qwen3-tied

KEY=VALUE sets a key of the config; VALUE is JSON, or else a string. A new folder also has to be
named in GOLDENS in model-zoo/src/config/tests.rs and counted in tests/tests/goldens.rs. The same
arguments and versions give the same model; the logits are the machine's up to rounding.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
PROMPT_LENGTHS = (1, 5, 17, 40, 97)
GREEDY_TOKENS = 24
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # Not hidden_size / num_attention_heads: a loader that derives it is found out.
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 259,
    "tie_word_embeddings": False,
}
# What an architecture takes beside SIZES. Transformers' Qwen2 has no head_dim key.
ARCHITECTURES = {
    "llama": {},
    "mistral": {"sliding_window": 12},
    "qwen2": {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3": {},
}


def main():
    args = parse_args()
    config = make_config(args.architecture, dict(args.overrides))
    generator = torch.Generator().manual_seed(args.seed)
    if config.vocab_size != tokenizer_size(args.tokenizer):
        sys.exit(f"{args.tokenizer} is not a tokenizer of {config.vocab_size} tokens")
    args.out.mkdir(parents=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, generator)
    model.save_pretrained(args.out)
    shutil.copyfile(args.tokenizer, args.out / "tokenizer.json")
    tensors = record(args.out, config.vocab_size, generator)
    save_file(tensors, args.out / "golden.safetensors")
    print(f"{args.out}: {model.num_parameters()} parameters, {len(PROMPT_LENGTHS)} sequences")


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architecture", required=True, choices=ARCHITECTURES)
    parser.add_argument("--out", required=True, type=Path, help="folder to make; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (default: 0)")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=ROOT / "tests/data/goldens/llama-gqa/tokenizer.json",
        help="tokenizer.json to copy (default: that of llama-gqa)",
    )
    parser.add_argument(
        "overrides", nargs="*", type=key_value, metavar="KEY=VALUE", help="keys of the config"
    )
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists")
    return args


def key_value(text):
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def make_config(architecture, overrides):
    config = AutoConfig.for_model(architecture)
    unknown = [key for key in overrides if not hasattr(config, key)]
    if unknown:
        sys.exit(f"the config of {architecture} has no {', '.join(unknown)}")
    keys = {key: value for key, value in SIZES.items() if hasattr(config, key)}
    config = AutoConfig.for_model(
        architecture, **(keys | ARCHITECTURES[architecture] | overrides), dtype="float32"
    )
    config._attn_implementation = "eager"
    return config


def tokenizer_size(path):
    """Tokens of a tokenizer.json, special ones included."""
    tokenizer = json.loads(path.read_text())
    ids = set(tokenizer["model"]["vocab"].values())
    return len(ids | {token["id"] for token in tokenizer["added_tokens"]})


@torch.no_grad()
def randomise(model, generator):
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 2:
            parameter.copy_(noise * 1.6 / parameter.shape[1] ** 0.5)
        elif name.endswith(".bias"):
            parameter.copy_(noise * 0.2)
        elif "norm" in name:
            parameter.copy_(1 + noise * 0.2)
        else:
            sys.exit(f"{name} {tuple(parameter.shape)} is neither matrix, bias nor norm")


@torch.inference_mode()
def record(folder, vocab_size, generator):
    """Runs the saved files, so that what is recorded belongs to what is on disk."""
    models = {
        dtype: AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()
        for dtype in (torch.float32, torch.bfloat16)
    }
    tensors = {}
    for i, length in enumerate(PROMPT_LENGTHS):
        ids = torch.randint(vocab_size, (length,), generator=generator)
        tensors[f"ids_{i}"] = ids
        tensors[f"logits_{i}"] = logits(models[torch.float32], ids)
        tensors[f"greedy_{i}"] = greedy(models[torch.float32], ids)
        tensors[f"logits_bf16_{i}"] = logits(models[torch.bfloat16], ids)
    return tensors


def logits(model, ids):
    """[T] ids to [T, V] float32 logits, in one pass without a cache."""
    return model(ids[None], use_cache=False).logits[0].float()


def greedy(model, ids):
    prompt_len = len(ids)
    for _ in range(GREEDY_TOKENS):
        last = logits(model, ids)[-1]
        ids = torch.cat([ids, (last == last.max()).nonzero()[0]])
    return ids[prompt_len:].clone()


if __name__ == "__main__":
    main()
