"""Makes the requests of the comparison: prompts of English sentences, of exact numbers of tokens.

    workloads.py --tokenizer MODEL/tokenizer.json --out DIR

writes DIR/NAME.N.jsonl, in the form that `quire generate --input` takes. All follows from SEED and
the words below, so every machine measures the same requests. Needs the package `tokenizers`.

    A       prompt 128, output 128
    B1024   prompt 1024, output 1            B4096  prompt 4096, output 1
    C       64 requests: prompt 16 to 512, output 50 (a fifth of them) or 300
    C16     the first 16 requests of C, for larger models
    D       32 requests: 512 tokens that all share, 32 of their own, output 32
    warm    prompt 128, output 1 or 16, to warm up with
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from measure import NUM_VARIANTS, SINGLE_REPEATS

SEED = 20261129

SUBJECTS = ("The captain", "A young baker", "Our neighbour", "The night nurse",
            "An honest merchant", "The lock keeper", "Every apprentice", "The librarian",
            "A tired engineer", "The gardener", "My grandmother", "The second violinist",
            "The weather service", "A travelling doctor", "The committee", "The smallest child")
VERBS = ("remembered", "repaired", "described", "measured", "carried", "borrowed", "painted",
         "counted", "translated", "followed", "questioned", "collected", "sharpened", "postponed",
         "explained", "defended")
OBJECTS = ("the copper kettle", "a map of the northern coast", "three letters from the mainland",
           "the broken clock", "a basket of green apples", "the rules of the old game",
           "an unfinished song", "the price of salt", "a row of empty bottles",
           "the shape of the hill", "several good reasons", "the long report",
           "a lamp with a blue shade", "the engine of the ferry", "two pairs of boots",
           "the history of the valley")
ENDINGS = ("before the rain began", "with great patience", "while the others slept",
           "because nobody else would", "at the edge of the market",
           "for the third time that week", "in the light of a single candle",
           "without saying a word", "after the bridge was closed",
           "as if it were the simplest thing in the world", "on the last day of autumn",
           "to everyone's surprise", "under the eyes of the whole street",
           "between two and four in the afternoon", "against the advice of the doctor",
           "near the old customs house")


class Maker:
    """Prompts of exact lengths in the tokens of one tokenizer."""

    def __init__(self, tokenizer: Path):
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(tokenizer))

    def prompt(self, num_tokens: int, seed: str) -> list[int]:
        """`num_tokens` ids of sentences that `seed` decides."""
        rng = random.Random(f"{SEED}/{seed}")
        text = ""
        while True:
            # A sentence has fewer than 50 tokens; the last ids of a text change as it grows.
            for _ in range(1 + num_tokens // 50):
                text += sentence(rng) + " "
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) > num_tokens + 8:
                return ids[:num_tokens]


def sentence(rng: random.Random) -> str:
    words = [rng.choice(part) for part in (SUBJECTS, VERBS, OBJECTS, ENDINGS)]
    return " ".join(words) + "."


def workloads(maker: Maker) -> dict[str, list[tuple[list[int], int]]]:
    """File stem -> prompts with their numbers of tokens to generate."""
    made = {"warm.0": [(maker.prompt(128, "warm/0"), 1)],
            "warm.1": [(maker.prompt(128, "warm/1"), 16)]}
    for name, length, output in (("A", 128, 128), ("B1024", 1024, 1), ("B4096", 4096, 1)):
        for repeat in range(SINGLE_REPEATS):
            made[f"{name}.{repeat}"] = [(maker.prompt(length, f"{name}/{repeat}"), output)]
    for variant in range(NUM_VARIANTS):
        rng = random.Random(SEED + 3)  # every variant has the same lengths
        lengths = [(rng.randint(16, 512), 50 if rng.random() < 0.2 else 300) for _ in range(64)]
        mixed = [(maker.prompt(length, f"C/{variant}/{index}"), output)
                 for index, (length, output) in enumerate(lengths)]
        prefix = maker.prompt(512, f"D/{variant}/prefix")
        made[f"C.{variant}"] = mixed
        made[f"C16.{variant}"] = mixed[:16]
        made[f"D.{variant}"] = [(prefix + maker.prompt(32, f"D/{variant}/{index}"), 32)
                                for index in range(32)]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for stem, prompts in workloads(Maker(args.tokenizer)).items():
        with open(args.out / f"{stem}.jsonl", "w", encoding="utf-8") as file:
            for index, (ids, num_tokens) in enumerate(prompts):
                request = {"id": f"{stem}-{index}", "prompt_token_ids": ids,
                           "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
                file.write(json.dumps(request) + "\n")


if __name__ == "__main__":
    main()
