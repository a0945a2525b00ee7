"""Random weights of a given shape in Hugging Face transformers, static batches.

Started by gpu-check with a task (JSON) as its argument. Prints a line of JSON for each batch, or one
that says why nothing can be run.
"""

import json
import sys
import time


def measure(task):
    try:
        import torch
        import transformers
    except ImportError as error:
        yield {"skipped": f"python3 has no {error.name}"}
        return
    device = task["device"]
    if device == "cuda" and not torch.cuda.is_available():
        yield {"skipped": "torch finds no device"}
        return
    start = time.perf_counter()
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings")
    config = transformers.LlamaConfig(
        **{name: task[name] for name in sizes},
        max_position_embeddings=task["prompt"] + task["generated"] + 1,
        bos_token_id=None, eos_token_id=None, pad_token_id=0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).eval()

    def seconds(batch, tokens):
        ids = torch.randint(1, 256, (batch, task["prompt"]), device=device)
        mask = torch.ones_like(ids)
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=tokens,
                           max_new_tokens=tokens)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    for batch in task["batches"]:
        if time.perf_counter() - start > task["seconds"] / 2:
            return
        seconds(batch, 2)
        yield {
            "batch": batch,
            "first_s": seconds(batch, 1),
            "tokens": task["generated"],
            "total_s": seconds(batch, task["generated"]),
        }


for line in measure(json.loads(sys.argv[1])):
    print(json.dumps(line), flush=True)
