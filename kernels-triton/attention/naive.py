"""Attention over a paged cache, written to be read; f64 inside."""

import numpy as np


def gather(cache: np.ndarray, table: np.ndarray, length: int, kv: int, head: int) -> np.ndarray:
    """The first `length` keys (kv 0) or values (kv 1) of one KV head: [length, D].

    cache [num_blocks, 2, Hkv, block_size, D]; table [max_blocks] block ids.
    """
    block_size = cache.shape[3]
    positions = np.arange(length)
    return cache[table[positions // block_size], kv, head, positions % block_size]


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float,
           softcap: float) -> np.ndarray:
    """One query [D] over the keys and values [n, D] it sees: [D]."""
    scores = keys.astype(np.float64) @ q.astype(np.float64) * scale
    if softcap > 0.0:
        scores = softcap * np.tanh(scores / softcap)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum() @ values.astype(np.float64)


def attention(q: np.ndarray, cache: np.ndarray, block_tables: np.ndarray,
              query_start_loc: np.ndarray, seq_lens: np.ndarray, scale: float, softcap: float = 0.0,
              window: int | None = None) -> np.ndarray:
    """Causal attention of every new row: [T, Hq, D].

    q [T, Hq, D]; block_tables [S, max_blocks]; query_start_loc [S + 1]; seq_lens [S]. The rows of a
    sequence are its last ones; a row sees itself and the `window` - 1 keys before it.
    """
    out = np.zeros(q.shape, np.float64)
    group = q.shape[1] // cache.shape[2]
    for seq, length in enumerate(seq_lens):
        rows = range(query_start_loc[seq], query_start_loc[seq + 1])
        for head in range(q.shape[1]):
            keys = gather(cache, block_tables[seq], length, 0, head // group)
            values = gather(cache, block_tables[seq], length, 1, head // group)
            for row in rows:
                position = length - (rows.stop - row)
                first = 0 if window is None else max(0, position - window + 1)
                seen = slice(first, position + 1)
                out[row, head] = attend(q[row, head], keys[seen], values[seen], scale, softcap)
    return out
