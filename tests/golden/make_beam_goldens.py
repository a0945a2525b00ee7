#!/usr/bin/env python3
"""Record beam searches of the golden models with Hugging Face transformers, in float32.

Reads models that make_goldens.py has made and writes a file for each, NAME.json, with

  model       folder in tests/data/goldens
  versions    of torch and transformers
  cases       one search each:
      prompt, stop_token_ids, max_tokens, width, n, length_penalty, early_stopping
                  what `generate` was asked for; width is its num_beams, n its num_return_sequences
      token_ids   [n] the generated tokens, best sequence first, the stop token included
      scores      [n] sequences_scores; null for one beam, where transformers has none

The golden models hardly ever sample their own end-of-sequence token. Where a search shall find
ends, its stop tokens are taken from what the search without them generates, and prompts are drawn
until a stop token ends a sequence and, if one is found among 12, until another early_stopping finds
other sequences. A search that comes out differently when noise of 1e-4 is added to the
log-probabilities is left out: an engine that adds in another order would rightly differ, too.

    python -m venv .venv
    .venv/bin/pip install torch==2.13.0 transformers==5.24.0
    .venv/bin/python tests/golden/make_beam_goldens.py --out tests/data/beam

It takes a few minutes on two cores. The same versions give the same searches; the scores are the
machine's up to rounding.
"""

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("llama-gqa", "qwen3-qknorm")
NOISE = 1e-4
NOISY_RUNS = 3
MAX_DRAWS = 12
# (width, n, max_tokens, length_penalty, early_stopping, number of stop tokens); every line is
# recorded for every model, with another prompt.
SEARCHES = (
    (2, 2, 8, 1.0, False, 0),
    (4, 4, 12, 1.0, False, 0),
    (5, 3, 6, 0.5, "never", 0),
    (5, 5, 1, 1.0, False, 0),
    (4, 2, 1, 2.0, True, 1),
    (1, 1, 9, 1.0, False, 1),
    (2, 1, 12, 1.0, False, 2),
    (2, 2, 12, 1.0, True, 4),
    (2, 2, 12, 1.0, "never", 4),
    (4, 4, 12, 0.5, False, 8),
    (4, 4, 12, 0.5, True, 8),
    (4, 3, 12, 0.5, "never", 6),
    (4, 4, 10, 2.0, False, 6),
    (4, 4, 10, 2.0, "never", 8),
    (4, 2, 12, -0.5, False, 8),
    (4, 4, 12, -0.5, "never", 8),
    (5, 5, 12, 1.0, True, 10),
    (5, 2, 7, 0.0, "never", 8),
    (5, 5, 12, 2.0, True, 8),
    (5, 3, 12, 1.0, False, 4),
    (2, 2, 5, 1.0, False, 1),
    (2, 2, 10, 2.0, "never", 6),
)


class Noise:
    """Moves every log-probability by up to ±NOISE."""

    def __init__(self, generator):
        self.generator = generator

    def __call__(self, _ids, scores):
        noise = torch.rand(scores.shape, generator=self.generator)
        return scores + NOISE * (2 * noise - 1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path, help="folder for the files")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for seed, name in enumerate(MODELS):
        model = AutoModelForCausalLM.from_pretrained(
            ROOT / "tests/data/goldens" / name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        # Nothing of the model's own: every case says all that holds.
        model.generation_config = GenerationConfig()
        generator = torch.Generator().manual_seed(seed)
        cases = [record(model, search, generator) for search in SEARCHES]
        write(out / f"{name}.json", name, cases)


def write(path, name, cases):
    """One case a line."""
    head = {
        "model": name,
        "versions": {package: version(package) for package in ("torch", "transformers")},
    }
    lines = ",\n".join("  " + json.dumps(case) for case in cases)
    path.write_text(json.dumps(head)[:-1] + ', "cases": [\n' + lines + "\n]}\n")
    ended = sum(ids[-1] in c["stop_token_ids"] for c in cases for ids in c["token_ids"])
    print(f"{path}: {len(cases)} searches, {ended} sequences end with a stop token", flush=True)


def record(model, search, generator):
    spare = None
    for _ in range(MAX_DRAWS):
        case = draw(model, search, generator)
        ids, scores = generate(model, case)
        ended = any(row[-1] in case["stop_token_ids"] for row in ids)
        if ended != bool(case["stop_token_ids"]):
            continue
        if any(generate(model, case, Noise(generator))[0] != ids for _ in range(NOISY_RUNS)):
            continue
        spare = case | {"token_ids": ids, "scores": scores}
        if shows_its_mode(model, case, ids):
            break
    if spare is None:
        sys.exit(f"{search}: no firm search among {MAX_DRAWS}")
    return spare


def shows_its_mode(model, case, ids):
    """Another early_stopping finds other sequences, where it can matter."""
    if not case["stop_token_ids"] or 1 in (case["width"], case["max_tokens"]):
        return True
    others = [case | {"early_stopping": mode} for mode in (False, True, "never")]
    return any(generate(model, other)[0] != ids for other in others)


def draw(model, search, generator):
    width, n, max_tokens, length_penalty, early_stopping, num_stops = search
    length = int(torch.randint(1, 24, (1,), generator=generator))
    case = {
        "prompt": torch.randint(256, (length,), generator=generator).tolist(),
        "stop_token_ids": [],
        "max_tokens": max_tokens,
        "width": width,
        "n": n,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
    }
    # Ids that come up at different places in the beams.
    seen = sorted({id for ids in generate(model, case)[0] for id in ids})
    order = torch.randperm(len(seen), generator=generator).tolist()
    case["stop_token_ids"] = sorted(seen[i] for i in order[:num_stops])
    # Where the beams had too few.
    while len(case["stop_token_ids"]) < num_stops:
        extra = int(torch.randint(256, (1,), generator=generator))
        case["stop_token_ids"] = sorted({*case["stop_token_ids"], extra})
    return case


@torch.inference_mode()
def generate(model, case, noise=None):
    """Generated ids of each sequence, and scores."""
    prompt = torch.tensor([case["prompt"]])
    one = case["width"] == 1
    beams = {
        "num_beams": case["width"],
        "num_return_sequences": case["n"],
        "length_penalty": case["length_penalty"],
        "early_stopping": case["early_stopping"],
    }
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=case["max_tokens"],
        eos_token_id=case["stop_token_ids"] or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        logits_processor=LogitsProcessorList([noise] if noise else []),
        **({} if one else beams),
    )
    rows = output.sequences[:, prompt.shape[1] :].tolist()
    ids = [trim(row, case["stop_token_ids"]) for row in rows]
    return ids, None if one else output.sequences_scores.tolist()


def trim(ids, stops):
    """Without what is after the first stop token."""
    ends = [i for i, id in enumerate(ids) if id in stops]
    return ids[: ends[0] + 1] if ends else ids


if __name__ == "__main__":
    main()
