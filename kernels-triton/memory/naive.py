"""The data movers, written to be read."""

import numpy as np

LAST_SAMPLED = -1


def take_rows(table: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """table[rows], zeros for rows outside the table. table [n, width], rows [R]: [R, width]."""
    out = np.zeros((len(rows), table.shape[1]), table.dtype)
    inside = (rows >= 0) & (rows < len(table))
    out[inside] = table[rows[inside]]
    return out


def prepare_inputs(step: dict[str, np.ndarray], table: dict[str, np.ndarray],
                   block_size: int) -> dict[str, np.ndarray]:
    """token_ids, positions, slot_mapping [T] and seq_lens [S] of a step.

    step: token_ids [T], query_start_loc [S + 1], entries [S]; table, by row: num_computed,
    last_tokens, block_tables [rows, max_blocks].
    """
    starts = step["query_start_loc"]
    token_ids, positions, slots, seq_lens = step["token_ids"].copy(), [], [], []
    for seq, entry in enumerate(step["entries"]):
        computed = table["num_computed"][entry]
        for token in range(starts[seq], starts[seq + 1]):
            position = computed + token - starts[seq]
            block = int(table["block_tables"][entry, position // block_size])
            slot = -1 if block < 0 else block * block_size + position % block_size
            positions.append(position)
            slots.append(slot)
            if token_ids[token] == LAST_SAMPLED:
                token_ids[token] = table["last_tokens"][entry]
        seq_lens.append(computed + starts[seq + 1] - starts[seq])
    return {"token_ids": token_ids, "positions": np.array(positions),
            "slot_mapping": np.array(slots), "seq_lens": np.array(seq_lens)}
