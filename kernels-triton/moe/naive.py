"""A mixture-of-experts layer, token by token, in f64."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Routing:
    """How scores become experts and weights."""

    top_k: int
    use_sigmoid: bool = False
    renormalise: bool = False
    scale: float = 1.0
    # [E] f32, added to the scores for the choice alone.
    bias: np.ndarray | None = None


def scores(logits: np.ndarray, use_sigmoid: bool) -> np.ndarray:
    """Softmax over [E] logits, or the sigmoid of each; f64."""
    x = logits.astype(np.float64)
    if use_sigmoid:
        return 1 / (1 + np.exp(-x))
    exps = np.exp(x - x.max())
    return exps / exps.sum()


def route(logits: np.ndarray, routing: Routing) -> tuple[np.ndarray, np.ndarray]:
    """Experts (ascending) and weights of one token, [top_k] each; ties to the lower expert."""
    score = scores(logits, routing.use_sigmoid)
    choice = logits if routing.bias is None else score + routing.bias
    expert = np.sort(np.argsort(-choice, kind="stable")[:routing.top_k])
    weight = score[expert]
    if routing.renormalise:
        weight = weight / weight.sum()
    return expert, weight * routing.scale


def grouped_gemm(x: np.ndarray, w: np.ndarray, expert: np.ndarray) -> np.ndarray:
    """x[s] w[expert[s]]^T of each slot. x: [S, K]; w: [E, N, K]; expert: [S]; [S, N] f64."""
    return np.stack([x[s].astype(np.float64) @ w[e].T.astype(np.float64)
                     for s, e in enumerate(expert)])


def combine(residual: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """residual + the weighted sum of each token's slots. residual: [T, D]; weight: [T, top_k];
    y: [T * top_k, D]; f64."""
    slots = y.reshape(*weight.shape, -1).astype(np.float64)
    return residual + (slots * weight[:, :, None]).sum(axis=1)
