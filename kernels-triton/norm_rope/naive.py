"""RMS norm, rotary embedding and the cache write, head by head, in f64."""

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x * weight / sqrt(mean(x^2) + eps) over the last axis, f64."""
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rotate(head: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotates the first 2 * len(cos) elements of a head [D] by the angles of its position."""
    half = len(cos)
    y = head.astype(np.float64)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        y[a] = head[a] * cos[i] - head[b] * sin[i]
        y[b] = head[b] * cos[i] + head[a] * sin[i]
    return y


def qk_norm_rope_write_kv(qkv: np.ndarray, num_q_heads: int, cache: np.ndarray,
                          positions: np.ndarray, slots: np.ndarray, cos: np.ndarray,
                          sin: np.ndarray, interleaved: bool, norms: tuple | None,
                          eps: float) -> np.ndarray:
    """Writes keys and values into `cache` [num_blocks, 2, Hkv, block_size, D] and returns the
    queries [T, Hq, D], f64.

    qkv: [T, Hq + 2 Hkv, D]; norms: weights [D] of the query's and the key's norm.
    """
    _, _, num_kv_heads, block_size, head_dim = cache.shape
    q_out = np.empty((len(qkv), num_q_heads, head_dim))

    def transformed(t: int, head: int, norm: int) -> np.ndarray:
        x = qkv[t, head]
        x = x if norms is None else rms_norm(x, norms[norm], eps)
        return rotate(x, cos[positions[t]], sin[positions[t]], interleaved)

    for t, slot in enumerate(slots):
        for h in range(num_q_heads):
            q_out[t, h] = transformed(t, h, 0)
        if slot < 0:
            continue
        block, offset = divmod(int(slot), block_size)
        for h in range(num_kv_heads):
            cache[block, 0, h, offset] = transformed(t, num_q_heads + h, 1)
            cache[block, 1, h, offset] = qkv[t, num_q_heads + num_kv_heads + h]
    return q_out
