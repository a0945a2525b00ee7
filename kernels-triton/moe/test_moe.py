"""Routing, grouping and the grouped GEMM in Triton's interpreter against `naive.py`."""

import numpy as np
import pytest
from interpreter import Tensor
from moe import kernels, naive
from moe.naive import Routing

CHUNK, BLOCK_E = 16, 16
# Relative to the sum of absolute products: inputs are exact, sums are f32 whatever the type.
TOLERANCE = 1e-6


def normal(seed: int, *shape: int) -> np.ndarray:
    """Normally distributed f32."""
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def run_route(logits: np.ndarray, routing: Routing) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's experts and weights, [T, top_k] each."""
    num_tokens, num_experts = logits.shape
    expert = Tensor(np.full((num_tokens, routing.top_k), -1, np.int32))
    weight = Tensor(np.full((num_tokens, routing.top_k), np.nan, np.float32))
    has_bias = routing.bias is not None
    bias = Tensor(routing.bias if has_bias else np.full(num_experts, np.nan, np.float32))
    kernels.route[(num_tokens,)](
        expert, weight, Tensor(logits), bias, num_experts, routing.top_k, int(routing.use_sigmoid),
        int(has_bias), int(routing.renormalise), routing.scale, BLOCK_E=BLOCK_E)
    return expert.array, weight.array


@pytest.mark.parametrize("routing", [
    Routing(1), Routing(2, renormalise=True), Routing(8), Routing(11, use_sigmoid=True),
    Routing(4, use_sigmoid=True, renormalise=True, scale=2.5, bias=normal(9, 11)),
])
def test_route(routing: Routing) -> None:
    logits = normal(1, 7, 11)
    logits[2] = np.round(logits[2])  # ties
    logits[3, 4:] = -np.inf  # fewer experts than asked for
    logits[4] = 0.0
    expert, weight = run_route(logits, routing)
    for t in range(7):
        want_expert, want_weight = naive.route(logits[t], routing)
        assert expert[t].tolist() == want_expert.tolist()
        np.testing.assert_allclose(weight[t], want_weight, rtol=2e-6)


@pytest.mark.filterwarnings("ignore:invalid value")  # NaN is what it is about
def test_route_stays_within_the_experts_whatever_the_logits_are() -> None:
    logits = np.full((2, 11), np.nan, np.float32)
    logits[1, 6] = 1.0
    expert, _ = run_route(logits, Routing(3))
    assert expert.tolist() == [[0, 1, 2], [0, 1, 6]]


class Plan:
    """The slots of `expert` [S] grouped into tiles of `block_m`."""

    def __init__(self, expert: np.ndarray, num_experts: int, block_m: int) -> None:
        self.expert, self.block_m, self.num_slots = expert, block_m, len(expert)
        self.max_tiles = self.num_slots // block_m + min(self.num_slots, num_experts)
        num_chunks = -(-self.num_slots // CHUNK)
        experts = Tensor(expert.astype(np.int32))
        counts = Tensor(np.full((num_chunks, num_experts), 77, np.int32))
        starts = Tensor(np.full((num_chunks, num_experts), 77, np.int32))
        self.sorted_slots = Tensor(np.full(self.max_tiles * block_m, -1, np.int32))
        self.tile_expert = Tensor(np.full(self.max_tiles, -1, np.int32))
        self.num_tiles = Tensor(np.array([-1], np.int32))
        kernels.count_experts[(num_chunks,)](counts, experts, self.num_slots, num_experts,
                                             CHUNK=CHUNK, BLOCK_E=BLOCK_E)
        kernels.plan_tiles[(1,)](self.sorted_slots, self.tile_expert, self.num_tiles, starts,
                                 counts, self.num_slots, num_chunks, num_experts, block_m,
                                 BLOCK_E=BLOCK_E)
        kernels.place_slots[(num_chunks,)](self.sorted_slots, experts, starts, self.num_slots,
                                           num_experts, CHUNK=CHUNK)

    def gemm(self, x: Tensor, w: Tensor, slots_per_row: int, block_n: int = 16) -> np.ndarray:
        """[S, N] f32."""
        _, n, k = w.shape
        out = Tensor(np.full((self.num_slots, n), np.nan, np.float32))
        grid = (self.max_tiles, -(-n // block_n))
        kernels.grouped_gemm[grid](
            out, x, w, self.sorted_slots, self.tile_expert, self.num_tiles, self.num_slots,
            slots_per_row, n, k, BLOCK_M=self.block_m, BLOCK_N=block_n, BLOCK_K=64)
        return out.array


@pytest.mark.parametrize("num_slots, num_experts, block_m",
                         [(1, 8, 16), (40, 5, 16), (70, 11, 16), (100, 2, 32), (33, 16, 4)])
def test_slots_are_grouped_by_expert_in_whole_tiles(num_slots: int, num_experts: int,
                                                    block_m: int) -> None:
    expert = np.random.default_rng(num_slots).integers(0, num_experts, num_slots)
    if num_experts == 11:
        expert[expert == 3] = 4  # an expert without slots
    plan = Plan(expert, num_experts, block_m)
    want_slots, want_experts = [], []
    for e in range(num_experts):
        mine = np.flatnonzero(expert == e).tolist()
        tiles = -(-len(mine) // block_m)
        want_slots += mine + [num_slots] * (tiles * block_m - len(mine))
        want_experts += [e] * tiles
    assert plan.num_tiles.array[0] == len(want_experts)
    assert plan.tile_expert.array[:len(want_experts)].tolist() == want_experts
    assert plan.sorted_slots.array[:len(want_slots)].tolist() == want_slots


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("slots_per_row", [1, 3])
def test_grouped_gemm(dtype: str, slots_per_row: int) -> None:
    expert = np.random.default_rng(4).integers(0, 5, 30)
    x, w = Tensor(normal(1, 30 // slots_per_row, 72), dtype), Tensor(normal(2, 5, 24, 72), dtype)
    got = Plan(expert, 5, 16).gemm(x, w, slots_per_row)
    rows = np.repeat(x.f32, slots_per_row, axis=0)
    want = naive.grouped_gemm(rows, w.f32, expert)
    size = naive.grouped_gemm(np.abs(rows), np.abs(w.f32), expert)
    assert (np.abs(got - want) <= TOLERANCE * size).all()


def test_a_slot_does_not_depend_on_its_batch_or_on_the_tile() -> None:
    expert = np.random.default_rng(5).integers(0, 3, 20)
    x, w = normal(3, 20, 96), Tensor(normal(4, 3, 20, 96), "bf16")
    together = Plan(expert, 3, 16).gemm(Tensor(x, "bf16"), w, 1)
    wider = Plan(expert, 3, 32).gemm(Tensor(x, "bf16"), w, 1, block_n=32)
    np.testing.assert_array_equal(wider, together)
    for s in (0, 7, 19):
        alone = Plan(expert[s:s + 1], 3, 16).gemm(Tensor(x[s:s + 1], "bf16"), w, 1)
        np.testing.assert_array_equal(alone[0], together[s])


def test_combine_adds_in_expert_order() -> None:
    residual, y, weight = normal(1, 4, 300), normal(2, 12, 300), normal(3, 4, 3)
    out = Tensor(residual)
    kernels.combine[(4, 2)](out, Tensor(y), Tensor(weight), 3, 300, BLOCK=256)
    np.testing.assert_allclose(out.array, naive.combine(residual, y, weight), atol=2e-6)
    # Large contributions that cancel tell one order from another.
    y = np.array([[1e8], [-1e8], [1.0]], np.float32)
    one = Tensor(np.zeros((1, 1), np.float32))
    kernels.combine[(1, 1)](one, Tensor(y), Tensor(np.ones((1, 3), np.float32)), 3, 1, BLOCK=256)
    assert one.array[0, 0] == 1.0
