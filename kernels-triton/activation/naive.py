"""Gated activations, in f64."""

import numpy as np


def silu_mul(gate_up: np.ndarray) -> np.ndarray:
    """silu(gate) * up of rows [R, 2 width] with the gates first; [R, width] f64."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up
