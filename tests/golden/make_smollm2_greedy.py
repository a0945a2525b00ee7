#!/usr/bin/env python3
"""Record what Hugging Face transformers generates for SmolLM2-135M-Instruct.

The weights are those of the Q4_1 GGUF, dequantised to float32 and run in float32, so the file,
tests/data/smollm2-greedy.json, is a reference for an engine that loads the GGUF itself. For each
prompt it holds, besides the prompt's text and token ids:

  token_ids   the greedy continuation: a fixed number of tokens, not stopped by end-of-sequence
  text        its decoding, special tokens included
  logprobs    natural-log probability of each of those tokens, from logits in float32
  gaps        logit of the best token minus logit of the second best; where it is small, an engine
              that adds in another order may rightly choose the other token, and go on from there
  bf16        the same fields for the weights rounded to bfloat16 and run in bfloat16, whose logits
              are bfloat16 too: a gap of 0 is a tie, which goes to the lower token id

    python -m venv .venv
    .venv/bin/pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0
    scripts/fetch-model.sh
    .venv/bin/python tests/golden/make_smollm2_greedy.py \\
        --gguf models/SmolLM2-135M-Instruct.Q4_1.gguf --out tests/data/smollm2-greedy.json

It takes about a minute on two cores.
"""

import argparse
import hashlib
import json
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

# (name, text); from 3 to about 200 tokens.
PROMPTS = [
    ("shortest", "The capital of"),
    ("story", "Once upon a time, in a small village by the sea,"),
    ("french", "La Révolution française a commencé en 1789 parce que"),
    (
        "code",
        "def fibonacci(n):\n"
        '    """Return the n-th Fibonacci number."""\n'
        "    if n < 2:\n"
        "        return n\n"
        "    a, b = 0, 1\n"
        "    for _ in range(n - 1):",
    ),
    (
        "chat",
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n"
        "What is gravity?<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    (
        "list",
        "The planets of the solar system, from the nearest to the Sun to the farthest, "
        "with one fact about each:\n"
        "\n"
        "1. Mercury: the smallest planet, with a year of 88 days.\n"
        "2. Venus: the hottest planet, covered by thick clouds.\n"
        "3. Earth:",
    ),
    (
        "essay",
        "Water moves around the Earth in a cycle that never stops. The heat of the Sun "
        "turns the water of seas, lakes and rivers into vapour, which rises, cools and "
        "gathers into clouds. When the drops in a cloud become heavy enough they fall as "
        "rain or snow. Some of that water runs over the ground into streams; some of it "
        "sinks into the soil, where the roots of plants drink it or where it collects, "
        "deep under the surface, between grains of sand and in the cracks of rocks. The "
        "most important part of this cycle is",
    ),
    (
        "longest",
        "Notes of the meeting, Tuesday 14 March.\n"
        "\n"
        "Present: the head of the library, two members of the town council, and a "
        "teacher from the primary school.\n"
        "\n"
        "The roof of the reading room leaks in three places, and the buckets have to be "
        "emptied twice a day. The builder has sent an offer: 12,400 euros for a repair "
        "that should last ten years, or 31,000 euros for a new roof that should last "
        "fifty. The council can pay 15,000 euros this year. The teacher asked whether "
        "the pupils could still come on Thursdays; they can, if they sit on the north "
        "side of the room.\n"
        "\n"
        "The head of the library would rather wait one year and save for the new roof. "
        "The council members are afraid that the books will not survive another winter, "
        "and one of them offered to store the oldest volumes in the town hall until the "
        "work is done.\n"
        "\n"
        "Decision:",
    ),
]

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def main():
    args = parse_args()
    torch.set_num_threads(args.threads)
    reader = gguf.GGUFReader(args.gguf)
    tokenizer = read_tokenizer(reader)
    config, state = read_config(reader), read_weights(reader)
    cases = [
        {"name": n, "prompt": p, "prompt_token_ids": tokenizer.encode(p).ids} for n, p in PROMPTS
    ]
    for case in cases:
        assert (
            tokenizer.decode(case["prompt_token_ids"], skip_special_tokens=False) == case["prompt"]
        ), case["name"]
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(config, state, dtype)
        for case in cases:
            run = greedy(model, case["prompt_token_ids"], args.steps)
            run["text"] = tokenizer.decode(run["token_ids"], skip_special_tokens=False)
            if dtype == torch.float32:
                check_without_cache(model, case["prompt_token_ids"], run)
                case.update(run)
            else:
                case["bf16"] = run
            print(
                f"{dtype} {case['name']} ({len(case['prompt_token_ids'])} tokens): {run['text']!r}"
            )
    Path(args.out).write_text(to_json(header(args), cases), encoding="utf-8")


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--out", required=True, help="the JSON file to write")
    parser.add_argument(
        "--steps", type=int, default=48, help="tokens to generate for each prompt (default 48)"
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    return parser.parse_args()


def field(reader, key):
    return reader.fields[key].contents()


def read_tokenizer(reader):
    """The GGUF's byte-level BPE; its `smollm` split is single digits, then that of GPT-2."""
    assert field(reader, "tokenizer.ggml.pre") == "smollm"
    tokens = field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = field(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    assert tokenizer.get_vocab_size() == len(tokens)
    return tokenizer


def read_config(reader):
    """The GGUF's hyper-parameters as a transformers config."""
    assert field(reader, "general.architecture") == "llama"
    hidden, heads = field(reader, "llama.embedding_length"), field(
        reader, "llama.attention.head_count"
    )
    assert field(reader, "llama.rope.dimension_count") == hidden // heads
    return LlamaConfig(
        vocab_size=field(reader, "llama.vocab_size"),
        hidden_size=hidden,
        intermediate_size=field(reader, "llama.feed_forward_length"),
        num_hidden_layers=field(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=field(reader, "llama.context_length"),
        rms_norm_eps=field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": field(reader, "llama.rope.freq_base"),
        },
        tie_word_embeddings=not any(tensor.name == "output.weight" for tensor in reader.tensors),
        attn_implementation="eager",
    )


def read_weights(reader):
    """All tensors, dequantised to float32, by their transformers names."""
    heads = {
        "attn_q": field(reader, "llama.attention.head_count"),
        "attn_k": field(reader, "llama.attention.head_count_kv"),
    }
    state = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        base = tensor.name.removesuffix(".weight")
        if base in TOP_NAMES:
            state[f"{TOP_NAMES[base]}.weight"] = weight
            continue
        _, layer, part = base.split(".")
        if part in heads:
            weight = half_split_rows(weight, heads[part])
        state[f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"] = weight
    return state


def half_split_rows(weight, num_heads):
    """Reorder the rows of each head from GGUF's rotary order to that of transformers.

    In the GGUF the two rows of a rotated pair are neighbours; in transformers the first rows of all
    pairs come before the second rows."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def build_model(config, state, dtype):
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else []), missing
    model.tie_weights()
    theta, head_dim = config.rope_parameters["rope_theta"], config.head_dim
    inv_freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    torch.testing.assert_close(
        model.model.rotary_emb.inv_freq.double(), inv_freq, rtol=1e-6, atol=0
    )
    # Parameters only: `Module.to` would also round the rotary frequencies, which stay in float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()


@torch.inference_mode()
def greedy(model, prompt_ids, steps):
    """`steps` tokens with the KV cache; ties go to the lower token id."""
    run = {"token_ids": [], "logprobs": [], "gaps": []}
    cache, inputs = None, prompt_ids
    for _ in range(steps):
        output = model(torch.tensor([inputs]), cache=cache, use_cache=True)
        cache, logits = output.cache, output.logits[0, -1].float()
        best, second = logits.topk(2).values.tolist()
        token = int((logits == best).nonzero()[0])
        run["token_ids"].append(token)
        run["logprobs"].append(round(logits.log_softmax(0)[token].item(), 5))
        run["gaps"].append(round(best - second, 5))
        inputs = [token]
    return run


@torch.inference_mode()
def check_without_cache(model, prompt_ids, run):
    """One pass over prompt and continuation must give the same tokens and log-probabilities."""
    ids = torch.tensor([prompt_ids + run["token_ids"]])
    logits = model(ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].float()
    assert logits.argmax(-1).tolist() == run["token_ids"]
    logprobs = logits.log_softmax(-1).gather(1, ids[0, len(prompt_ids) :, None])[:, 0]
    torch.testing.assert_close(logprobs, torch.tensor(run["logprobs"]), rtol=0, atol=1e-3)


def header(args):
    digest = hashlib.sha256(Path(args.gguf).read_bytes()).hexdigest()
    packages = ("torch", "transformers", "tokenizers", "gguf", "numpy")
    return {
        "about": "Greedy continuations by transformers; the script describes the fields.",
        "command": shlex.join(["python", *sys.argv]),
        "model": {"file": Path(args.gguf).name, "sha256": digest},
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in packages},
        "machine": platform.machine(),
        "steps": args.steps,
    }


def to_json(head, cases):
    """JSON with one field a line: readable, and a changed array is one changed line."""

    def fields(mapping, indent):
        lines = []
        for key, value in mapping.items():
            nested = key == "bf16"
            body = (
                "{\n" + fields(value, indent + 2) + "\n" + " " * indent + "}"
                if nested
                else dump(value)
            )
            lines.append(f"{' ' * indent}{json.dumps(key)}: {body}")
        return ",\n".join(lines)

    def dump(value):
        return json.dumps(value, ensure_ascii=False)

    body = ",\n".join("    {\n" + fields(case, 6) + "\n    }" for case in cases)
    return "{\n" + fields(head, 2) + ',\n  "cases": [\n' + body + "\n  ]\n}\n"


if __name__ == "__main__":
    main()
