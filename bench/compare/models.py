"""Makes the files of weights that the engines load. Needs gguf, safetensors, tokenizers, ml_dtypes.

    models.py from-gguf FILE.gguf DIR       a Llama GGUF -> Hugging Face folder in bf16
    models.py random DIR --tokenizer DIR    a folder of random weights in the shape of Llama 3.2 1B
    models.py to-gguf DIR FILE.gguf --type bf16|q8_0

Random weights serve for speed alone: their text is noise. GGUF files of Llama models hold the rows
of Q and K in the order of interleaved rotary pairs, folders in that of halves.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from gguf.quants import dequantize, quantize
from safetensors import safe_open
from safetensors.numpy import save_file

SEED = 20261129
BF16 = ml_dtypes.bfloat16
LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": None, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
    "attention_dropout": 0.0, "initializer_range": 0.02, "pretraining_tp": 1,
    "tie_word_embeddings": True, "use_cache": True, "vocab_size": 49152,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                   "generation_config.json")

# Names in GGUF -> names in a folder, within a layer and outside.
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm",
               "output": "lm_head"}


def folder_name(name: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`"""
    stem = name.removesuffix(".weight")
    if stem in MODEL_NAMES:
        return f"{MODEL_NAMES[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


def gguf_names(num_layers: int) -> dict[str, str]:
    """The inverse of `folder_name`."""
    names = [f"{name}.weight" for name in MODEL_NAMES]
    names += [f"blk.{i}.{name}.weight" for i in range(num_layers) for name in LAYER_NAMES]
    return {folder_name(name): name for name in names}


def halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleaved rotary pairs -> halves."""
    size = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, size, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The inverse of `halves`."""
    size = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, 2, size, -1).swapaxes(1, 2).reshape(rows.shape)


def rotary_heads(name: str, config: dict) -> int | None:
    """The number of heads of Q or K, None for other weights."""
    return {"q_proj.weight": config["num_attention_heads"],
            "k_proj.weight": config["num_key_value_heads"]}.get(name.rpartition("self_attn.")[2])


def write_folder(folder: Path, config: dict, weights: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# ---------------------------------------------------------------- GGUF -> folder


def from_gguf(source: Path, folder: Path) -> None:
    reader = gguf.GGUFReader(source)

    def field(key: str):
        return reader.fields[key].contents()

    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = LLAMA_1B | {
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": field("llama.embedding_length") // field("llama.attention.head_count"),
        "max_position_embeddings": field("llama.context_length"),
        "rope_theta": float(field("llama.rope.freq_base")),
        "rms_norm_eps": round(float(field("llama.attention.layer_norm_rms_epsilon")), 9),
        "tie_word_embeddings": tied, "vocab_size": field("llama.vocab_size"),
    }
    weights = {}
    for tensor in reader.tensors:
        name = folder_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        heads = rotary_heads(name, config)
        values = halves(values, heads) if heads else values
        weights[name] = np.ascontiguousarray(values.astype(BF16))
    write_folder(folder, config, weights)
    write_tokenizer(folder, field, config["max_position_embeddings"])


def write_tokenizer(folder: Path, field, max_len: int) -> None:
    """Byte-level BPE that keeps digits apart, as SmolLM2 has it."""
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    special = [{"id": i, "content": token, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False, "special": True}
               for i, token in enumerate(tokens) if types[i] == gguf.TokenType.CONTROL]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            byte_level | {"add_prefix_space": False}]},
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: i for i, token in enumerate(tokens)},
                  "merges": field("tokenizer.ggml.merges")},
    }
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>",
             "unk_token": "<|endoftext|>"}
    settings = names | {"add_prefix_space": False, "clean_up_tokenization_spaces": False,
                        "model_max_length": max_len, "tokenizer_class": "GPT2Tokenizer",
                        "chat_template": field("tokenizer.chat_template")}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    for name, content in zip(TOKENIZER_FILES, (tokenizer, settings, names, ids)):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


# ---------------------------------------------------------------- random weights


def random_folder(folder: Path, tokenizer: Path) -> None:
    rng = np.random.default_rng(SEED)
    config = LLAMA_1B
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden),
              "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        for part, shape in {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q_rows, hidden), "self_attn.k_proj": (kv_rows, hidden),
            "self_attn.v_proj": (kv_rows, hidden), "self_attn.o_proj": (hidden, q_rows),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            shapes[f"model.layers.{layer}.{part}.weight"] = shape
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = np.ones(shape, BF16)
        else:
            values = rng.standard_normal(shape, dtype=np.float32)
            weights[name] = (values * config["initializer_range"]).astype(BF16)
    write_folder(folder, config, weights)
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, folder)


# ---------------------------------------------------------------- folder -> GGUF


def to_gguf(folder: Path, target: Path, kind: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    matrix_type = {"bf16": gguf.GGMLQuantizationType.BF16,
                   "q8_0": gguf.GGMLQuantizationType.Q8_0}[kind]
    file_type = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
    writer = gguf.GGUFWriter(target, config["model_type"])
    writer.add_name(folder.name)
    writer.add_file_type(file_type[kind])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, folder)
    names = gguf_names(config["num_hidden_layers"])
    with safe_open(folder / "model.safetensors", "np") as file:
        for name in file.keys():
            values = file.get_tensor(name).astype(np.float32)
            heads = rotary_heads(name, config)
            values = pairs(values, heads) if heads else values
            if values.ndim == 1:
                writer.add_tensor(names[name], values)
            else:
                writer.add_tensor(names[name], quantize(values, matrix_type),
                                  raw_dtype=matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocab)
    writer.add_token_types([gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL
                            for i in range(len(vocab))])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge)
                             for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(settings["chat_template"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("from-gguf")
    command.add_argument("source", type=Path)
    command.add_argument("folder", type=Path)
    command = commands.add_parser("random")
    command.add_argument("folder", type=Path)
    command.add_argument("--tokenizer", type=Path, required=True)
    command = commands.add_parser("to-gguf")
    command.add_argument("folder", type=Path)
    command.add_argument("target", type=Path)
    command.add_argument("--type", choices=("bf16", "q8_0"), required=True)
    args = parser.parse_args()
    if args.command == "from-gguf":
        from_gguf(args.source, args.folder)
    elif args.command == "random":
        random_folder(args.folder, args.tokenizer)
    else:
        to_gguf(args.folder, args.target, args.type)


if __name__ == "__main__":
    main()
