"""Matrix products, written to be read; f64 inside."""

import numpy as np


def linear(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None,
           residual: np.ndarray | None = None) -> np.ndarray:
    """residual + x Wᵀ + bias. x [M, K], w [N, K], bias [N], residual [M, N]: [M, N]."""
    y = x.astype(np.float64) @ w.astype(np.float64).T
    if bias is not None:
        y += bias
    if residual is not None:
        y += residual
    return y


def silu_mul(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """silu(x Wgateᵀ) · (x Wupᵀ): [M, N/2]. x [M, K], w [N, K]; the gate is its first N/2 rows."""
    gate, up = np.split(linear(x, w), 2, axis=1)
    return gate / (1.0 + np.exp(-gate)) * up
