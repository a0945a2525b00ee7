"""Sampling: from a row of logits to its token and log-probabilities.

One row is one token to be chosen. Launches of a step, in order (S = splits of a row):

    prepare_logits  (R, S)  copy, allowed ids; partial statistics of the raw logits
    fold_stats      (R,)    raw maximum, status
    edit_logits     (R,)    suppressed ids, bias, penalties
    row_stats       (R, S)  partial statistics of what is left
    fold_stats      (R,)    maximum, its lowest id, status
    scale_logits    (R, S)  (x - max) / temperature, min-p
    cut_logits      (R,)    top-k and top-p: the least key that is kept
    draw_partials   (R, S)  best of logit + Gumbel noise in each split
    choose_tokens   (R,)    the token, or why there is none
    sum_exp, top_partials (R, S), fold_logprobs (R,)   only where log-probabilities are wanted

A row's result depends on its own logits and parameters alone: every number that is folded over
splits is an integer or a maximum, so that neither the order nor the number of splits matters.
Draws and kept sets are those of the CPU's sampler, bit for bit: noise is Philox4x32-10 with key
`seed` and counter (id / 4, position, 0, 0), `exp` and `ln` are the same polynomials of correctly
rounded operations, and probability mass is counted in units of 2^-40.

A *rank* packs a value and an id into an i64 that orders by value, then by lower id.
"""

import triton
import triton.language as tl

from sampling.numeric import NO_RANK, exp, gumbel, ln, order_key, rank_id, rank_of, rank_value

# Below this temperature the maximum is taken.
GREEDY_BELOW = tl.constexpr(1e-5)

# Status of a row.
OK = tl.constexpr(0)
NOT_A_NUMBER = tl.constexpr(1)
NOTHING_ALLOWED = tl.constexpr(2)

# `given` of a row whose token is to be sampled; `num_top` of a row without log-probabilities;
# start of the allowed ids of a row that allows all.
NONE = tl.constexpr(-1)

# Fixed-point unit of probability mass: sums are exact whatever their order.
MASS_ONE = tl.constexpr(1099511627776.0)
# Order keys of the lowest finite float, and just above that of 0.
LOWEST_KEY = tl.constexpr(-0x7F7FFFFF - 1)
ABOVE_ZERO_KEY = tl.constexpr(1)
# A key that every number reaches.
NO_CUT = tl.constexpr(-0x7FFFFFFF - 1)
MAX_FLOAT = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _load_logits(row, o_id, vocab, stride):
    """Logits of a row; what lies beyond the vocabulary (padding) is -inf. Padding is loaded, too,
    so that loads are 16 bytes wide whatever the vocabulary."""
    b_x = tl.load(row + o_id, mask=o_id < stride, other=float("-inf"))
    return tl.where(o_id < vocab, b_x, float("-inf"))


@triton.jit
def _store_stats(b_x, o_id, vocab, best, bad, at):
    """Rank of the largest logit of a split, and whether any is NaN or +inf."""
    is_bad = (b_x != b_x) | (b_x == float("inf"))
    # NaN has no rank; the row is refused anyway.
    b_rank = tl.where(is_bad | (o_id >= vocab), NO_RANK, rank_of(b_x, o_id))
    tl.store(best + at, tl.max(b_rank, 0))
    tl.store(bad + at, tl.max(is_bad.to(tl.int32), 0))


@triton.jit
def _is_listed(b_id, ids, first, end):
    """Whether each id is in the ascending list ids[first:end], by binary search."""
    b_at = tl.zeros_like(b_id) + first
    width = end - first
    while width > 1:
        half = width // 2
        b_mid = b_at + half
        b_at = tl.where(tl.load(ids + b_mid) <= b_id, b_mid, b_at)
        width -= half
    # An empty list has nothing to load.
    b_found = tl.load(ids + b_at, mask=b_at < end, other=-1)
    return b_found == b_id


@triton.jit
def prepare_logits(
    work,
    best,
    bad,
    logits,
    allowed_ids,
    allowed_range,
    vocab,
    stride,
    SPLIT: tl.constexpr,
):
    """Copies logits to where they are edited, -inf for ids that are not allowed, and takes the
    statistics of the raw ones. Grid (R, S), S = cdiv(vocab, SPLIT).

    work, logits: [R, stride] f32; best: [R, S] i64 rank; bad: [R, S] i32;
    allowed_ids: ascending; allowed_range: [R, 2] i32, (-1, -1) where all ids are allowed.
    """
    i_r = tl.program_id(0).to(tl.int64)
    i_s = tl.program_id(1)
    o_id = i_s * SPLIT + tl.arange(0, SPLIT)
    b_x = _load_logits(logits + i_r * stride, o_id, vocab, stride)
    _store_stats(b_x, o_id, vocab, best, bad, i_r * tl.num_programs(1) + i_s)
    first = tl.load(allowed_range + 2 * i_r)
    end = tl.load(allowed_range + 2 * i_r + 1)
    if first != NONE:
        b_x = tl.where(_is_listed(o_id, allowed_ids, first, end), b_x, float("-inf"))
    tl.store(work + i_r * stride + o_id, b_x, mask=o_id < stride)


@triton.jit
def row_stats(best, bad, logits, vocab, stride, SPLIT: tl.constexpr):
    """Statistics of each split of each row. Grid (R, S); shapes as in `prepare_logits`."""
    i_r = tl.program_id(0).to(tl.int64)
    i_s = tl.program_id(1)
    o_id = i_s * SPLIT + tl.arange(0, SPLIT)
    b_x = _load_logits(logits + i_r * stride, o_id, vocab, stride)
    _store_stats(b_x, o_id, vocab, best, bad, i_r * tl.num_programs(1) + i_s)


@triton.jit
def _max_rank(ranks, n, BLOCK: tl.constexpr):
    """The largest of n ranks."""
    b_best = tl.full([BLOCK], NO_RANK, tl.int64)
    for i in range(0, n, BLOCK):
        o_i = i + tl.arange(0, BLOCK)
        b_best = tl.maximum(b_best, tl.load(ranks + o_i, mask=o_i < n, other=NO_RANK))
    return tl.max(b_best, 0)


@triton.jit
def fold_stats(
    row_max,
    row_argmax,
    row_status,
    best,
    bad,
    num_splits,
    BLOCK: tl.constexpr,
):
    """Folds the statistics of a row's splits. Grid (R,).

    row_max: [R] f32; row_argmax: [R] i32, the lowest id of the maximum; row_status: [R] i32,
    whether the row has a token at all; best, bad: [R, num_splits].
    """
    i_r = tl.program_id(0).to(tl.int64)
    rank = _max_rank(best + i_r * num_splits, num_splits, BLOCK)
    b_bad = tl.zeros([BLOCK], tl.int32)
    for i in range(0, num_splits, BLOCK):
        o_s = i + tl.arange(0, BLOCK)
        p_bad = bad + i_r * num_splits + o_s
        b_bad = tl.maximum(b_bad, tl.load(p_bad, mask=o_s < num_splits, other=0))
    value = rank_value(rank)
    status = tl.where(value == float("-inf"), NOTHING_ALLOWED, OK)
    status = tl.where(tl.max(b_bad, 0) != 0, NOT_A_NUMBER, status)
    tl.store(row_max + i_r, value)
    tl.store(row_argmax + i_r, rank_id(rank))
    tl.store(row_status + i_r, status)


@triton.jit
def _suppress(row, ids, first, end, vocab, BLOCK: tl.constexpr):
    """-inf for the listed ids; ids beyond the vocabulary are passed over."""
    for i in range(first, end, BLOCK):
        o_i = i + tl.arange(0, BLOCK)
        b_id = tl.load(ids + o_i, mask=o_i < end, other=vocab)
        tl.store(row + b_id, tl.full([BLOCK], float("-inf"), tl.float32), mask=b_id < vocab)


@triton.jit
def _add_bias(row, ids, values, first, end, BLOCK: tl.constexpr):
    """Adds to the listed logits."""
    for i in range(first, end, BLOCK):
        o_i = i + tl.arange(0, BLOCK)
        is_entry = o_i < end
        b_id = tl.load(ids + o_i, mask=is_entry, other=0)
        b_x = tl.load(row + b_id, mask=is_entry, other=0.0)
        b_bias = tl.load(values + o_i, mask=is_entry, other=0.0)
        tl.store(row + b_id, b_x + b_bias, mask=is_entry)


@triton.jit
def _penalised(b_x, b_count, repetition, frequency, presence):
    """A seen token's logit: repetition over prompt and output, the others over the output."""
    b_y = tl.where(b_x > 0.0, tl.div_rn(b_x, repetition), b_x * repetition)
    # An extreme penalty is as strong as numbers go, and no stronger.
    b_clamped = tl.minimum(tl.maximum(b_y, -MAX_FLOAT), MAX_FLOAT)
    b_y = tl.where(b_x == float("-inf"), b_y, b_clamped)
    b_output = b_y - (frequency * b_count.to(tl.float32) + presence)
    return tl.where(b_count > 0, b_output, b_y)


@triton.jit
def edit_logits(
    work,
    suppressed_ids,
    suppressed_range,
    bias_ids,
    bias_values,
    bias_range,
    seen_ids,
    seen_counts,
    seen_range,
    repetition_penalty,
    frequency_penalty,
    presence_penalty,
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    """Suppressed ids, then bias, then penalties, in place. Grid (R,).

    work: [R, stride] f32; *_range: [R, 2] i32 into the lists; the ids of one row's bias, and of
    its seen tokens, are distinct; seen_counts: times in the output, 0 = only in the prompt;
    penalties: [R] f32.
    """
    i_r = tl.program_id(0).to(tl.int64)
    row = work + i_r * stride
    first = tl.load(suppressed_range + 2 * i_r)
    end = tl.load(suppressed_range + 2 * i_r + 1)
    _suppress(row, suppressed_ids, first, end, vocab, BLOCK)
    # One id may be in several lists: each edit must be seen by the next.
    tl.debug_barrier()
    first = tl.load(bias_range + 2 * i_r)
    end = tl.load(bias_range + 2 * i_r + 1)
    _add_bias(row, bias_ids, bias_values, first, end, BLOCK)
    tl.debug_barrier()
    repetition = tl.load(repetition_penalty + i_r)
    frequency = tl.load(frequency_penalty + i_r)
    presence = tl.load(presence_penalty + i_r)
    first = tl.load(seen_range + 2 * i_r)
    end = tl.load(seen_range + 2 * i_r + 1)
    for i in range(first, end, BLOCK):
        o_i = i + tl.arange(0, BLOCK)
        b_id = tl.load(seen_ids + o_i, mask=o_i < end, other=vocab)
        b_count = tl.load(seen_counts + o_i, mask=o_i < end, other=0)
        b_x = tl.load(row + b_id, mask=b_id < vocab, other=0.0)
        b_x = _penalised(b_x, b_count, repetition, frequency, presence)
        tl.store(row + b_id, b_x, mask=b_id < vocab)


@triton.jit
def scale_logits(work, row_max, temperature, min_p, vocab, stride, SPLIT: tl.constexpr):
    """(x - max) / temperature in place, -inf for tokens below min_p times the most likely one.
    Greedy rows stay as they are. Grid (R, S). work: [R, stride] f32; the others: [R] f32.
    """
    i_r = tl.program_id(0).to(tl.int64)
    o_id = tl.program_id(1) * SPLIT + tl.arange(0, SPLIT)
    t = tl.load(temperature + i_r)
    if t >= GREEDY_BELOW:
        # Relative to the maximum: a small temperature can send logits to -inf only.
        b_x = _load_logits(work + i_r * stride, o_id, vocab, stride) - tl.load(row_max + i_r)
        b_x = tl.div_rn(b_x, t)
        b_x = tl.where(exp(b_x) >= tl.load(min_p + i_r), b_x, float("-inf"))
        tl.store(work + i_r * stride + o_id, b_x, mask=o_id < stride)


@triton.jit
def _weight(b_x, BY_MASS: tl.constexpr):
    """What a scaled logit counts for: its probability mass, or 1."""
    if BY_MASS:
        return (exp(b_x) * MASS_ONE).to(tl.int64)
    else:
        return (b_x > float("-inf")).to(tl.int64)


@triton.jit
def _cut(row, vocab, stride, least, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key t for which the keys >= t together weigh at least `target`; the smallest
    key from `least` on where all of them weigh less. Keeping key >= t keeps ties at the cut.

    Every pass weighs what lies above three pivots of [low, high), keeps the quarter with the
    answer, and shrinks it to the keys that were there. The answer stays in [low, high): the keys
    from low on weigh enough (or are all there is), those from high on do not.
    """
    low = least.to(tl.int64)
    high = tl.full([], ABOVE_ZERO_KEY, tl.int64)
    while high - low > 1:
        p1 = low + ((high - low) >> 2)
        p2 = low + ((high - low) >> 1)
        p3 = low + ((3 * (high - low)) >> 2)
        b_w1 = tl.zeros([BLOCK], tl.int64)
        b_w2 = tl.zeros([BLOCK], tl.int64)
        b_w3 = tl.zeros([BLOCK], tl.int64)
        b_min = tl.zeros([BLOCK], tl.int32) + high.to(tl.int32)
        b_end = tl.zeros([BLOCK], tl.int32) + low.to(tl.int32)
        for i in range(0, vocab, BLOCK):
            b_x = _load_logits(row, i + tl.arange(0, BLOCK), vocab, stride)
            b_key = order_key(b_x)
            b_weight = _weight(b_x, BY_MASS)
            b_w1 += tl.where(b_key >= p1, b_weight, 0)
            b_w2 += tl.where(b_key >= p2, b_weight, 0)
            b_w3 += tl.where(b_key >= p3, b_weight, 0)
            is_inside = (b_key >= low) & (b_key < high)
            b_min = tl.where(is_inside, tl.minimum(b_min, b_key), b_min)
            b_end = tl.where(is_inside, tl.maximum(b_end, b_key + 1), b_end)
        least_inside = tl.min(b_min, 0).to(tl.int64)
        end_inside = tl.max(b_end, 0).to(tl.int64)
        is_enough1 = tl.sum(b_w1, 0) >= target
        is_enough2 = tl.sum(b_w2, 0) >= target
        is_enough3 = tl.sum(b_w3, 0) >= target
        quarter = tl.where(is_enough1, p1, low)
        quarter = tl.where(is_enough2, p2, quarter)
        quarter = tl.where(is_enough3, p3, quarter)
        quarter_end = tl.where(is_enough3, high, p3)
        quarter_end = tl.where(is_enough2, quarter_end, p2)
        quarter_end = tl.where(is_enough1, quarter_end, p1)
        low = tl.maximum(quarter, least_inside)
        high = tl.minimum(quarter_end, end_inside)
    return low.to(tl.int32)


@triton.jit
def _mass_from(row, vocab, stride, least, BLOCK: tl.constexpr):
    """Probability mass of the keys >= least."""
    b_sum = tl.zeros([BLOCK], tl.int64)
    for i in range(0, vocab, BLOCK):
        b_x = _load_logits(row, i + tl.arange(0, BLOCK), vocab, stride)
        b_sum += tl.where(order_key(b_x) >= least, _weight(b_x, True), 0)
    return tl.sum(b_sum, 0)


@triton.jit
def cut_logits(
    cut,
    work,
    temperature,
    top_k,
    top_p,
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    """The least order key that passes top-k (0 = off), then top-p (1 = off), ties included; no
    sort. Grid (R,). cut: [R] i32; work: [R, stride] f32 scaled logits; the others: [R].
    """
    i_r = tl.program_id(0).to(tl.int64)
    row = work + i_r * stride
    least = tl.full([], NO_CUT, tl.int32)
    if tl.load(temperature + i_r) >= GREEDY_BELOW:
        k = tl.load(top_k + i_r)
        p = tl.load(top_p + i_r)
        if k > 0:
            least = _cut(row, vocab, stride, tl.full([], LOWEST_KEY, tl.int32), k, False, BLOCK)
        if p < 1.0:
            total = _mass_from(row, vocab, stride, least, BLOCK)
            target = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            least = tl.maximum(least, LOWEST_KEY)
            least = _cut(row, vocab, stride, least, target, True, BLOCK)
    tl.store(cut + i_r, least)


@triton.jit
def draw_partials(
    draws,
    work,
    cut,
    temperature,
    seed,
    position,
    vocab,
    stride,
    SPLIT: tl.constexpr,
):
    """Rank of the largest kept logit + Gumbel noise in each split. Greedy rows draw nothing.
    Grid (R, S). draws: [R, S] i64; work: [R, stride] f32 scaled logits; cut: [R] i32 key;
    seed: [R] i64; position: [R] i32 of the token to be sampled. SPLIT is a multiple of 4.
    """
    i_r = tl.program_id(0).to(tl.int64)
    i_s = tl.program_id(1)
    best = tl.full([], NO_RANK, tl.int64)
    if tl.load(temperature + i_r) >= GREEDY_BELOW:
        # Four ids share a counter; interleaving puts word j of counter c at id 4c + j.
        o_counter = (i_s * (SPLIT // 4) + tl.arange(0, SPLIT // 4)).to(tl.uint32)
        b_zero = tl.zeros_like(o_counter)
        b_position = b_zero + tl.load(position + i_r).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(tl.load(seed + i_r), o_counter, b_position, b_zero, b_zero)
        b_word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        o_id = i_s * SPLIT + tl.arange(0, SPLIT)
        b_x = _load_logits(work + i_r * stride, o_id, vocab, stride)
        is_kept = (b_x > float("-inf")) & (order_key(b_x) >= tl.load(cut + i_r))
        b_rank = tl.where(is_kept, rank_of(b_x + gumbel(b_word), o_id), NO_RANK)
        best = tl.max(b_rank, 0)
    tl.store(draws + i_r * tl.num_programs(1) + i_s, best)


@triton.jit
def choose_tokens(
    token,
    status,
    draws,
    raw_status,
    row_argmax,
    row_status,
    temperature,
    given,
    num_splits,
    BLOCK: tl.constexpr,
):
    """The token of each row, or why it has none. Grid (R,).

    token: [R] i32, 0 where the status is not OK; status: [R] i32; draws: [R, num_splits] i64;
    raw_status: of the raw logits; row_argmax, row_status: of the edited ones; given: [R] i32,
    the token of a row that samples none, else -1.
    """
    i_r = tl.program_id(0).to(tl.int64)
    drawn = rank_id(_max_rank(draws + i_r * num_splits, num_splits, BLOCK))
    is_greedy = tl.load(temperature + i_r) < GREEDY_BELOW
    known = tl.load(given + i_r)
    chosen = tl.where(is_greedy, tl.load(row_argmax + i_r), drawn)
    chosen = tl.where(known != NONE, known, chosen)
    # A given token needs raw logits only.
    reason = tl.where(known != NONE, OK, tl.load(row_status + i_r))
    raw = tl.load(raw_status + i_r)
    reason = tl.where(raw != OK, raw, reason)
    tl.store(token + i_r, tl.where(reason == OK, chosen, 0))
    tl.store(status + i_r, reason)


@triton.jit
def sum_exp(sums, logits, row_max, vocab, stride, SPLIT: tl.constexpr):
    """Sum of exp(x - max) over each split, in units of 2^-40. Grid (R, S).

    sums: [R, S] i64; logits: [R, stride] f32 raw; row_max: [R] f32 of the raw logits.
    """
    i_r = tl.program_id(0).to(tl.int64)
    i_s = tl.program_id(1)
    o_id = i_s * SPLIT + tl.arange(0, SPLIT)
    b_x = _load_logits(logits + i_r * stride, o_id, vocab, stride) - tl.load(row_max + i_r)
    tl.store(sums + i_r * tl.num_programs(1) + i_s, tl.sum(_weight(b_x, True), 0))


@triton.jit
def top_partials(
    top,
    logits,
    num_top,
    max_top,
    vocab,
    stride,
    SPLIT: tl.constexpr,
):
    """Ranks of the largest logits of each split, best first. Grid (R, S).

    top: [R, S, max_top] i64, entries from num_top on are not written; num_top: [R] i32, at most
    max_top; a split with fewer ids fills up with the lowest rank.
    """
    i_r = tl.program_id(0).to(tl.int64)
    i_s = tl.program_id(1)
    o_id = i_s * SPLIT + tl.arange(0, SPLIT)
    b_x = _load_logits(logits + i_r * stride, o_id, vocab, stride)
    b_rank = tl.where(o_id < vocab, rank_of(b_x, o_id), NO_RANK)
    out = top + (i_r * tl.num_programs(1) + i_s) * max_top
    for i in range(0, tl.load(num_top + i_r)):
        best = tl.max(b_rank, 0)
        tl.store(out + i, best)
        b_rank = tl.where(b_rank == best, NO_RANK, b_rank)


@triton.jit
def _best_below(ranks, bound, num_splits, n, max_top, BLOCK: tl.constexpr):
    """The largest rank below `bound` among the first n of each split."""
    b_best = tl.full([BLOCK], NO_RANK, tl.int64)
    for i in range(0, num_splits * n, BLOCK):
        o_i = i + tl.arange(0, BLOCK)
        p_rank = ranks + (o_i // n).to(tl.int64) * max_top + o_i % n
        b_rank = tl.load(p_rank, mask=o_i < num_splits * n, other=NO_RANK)
        b_best = tl.where(b_rank < bound, tl.maximum(b_best, b_rank), b_best)
    return tl.max(b_best, 0)


@triton.jit
def fold_logprobs(
    logprob,
    top_ids,
    top_logprobs,
    logits,
    token,
    row_max,
    sums,
    top,
    num_top,
    max_top,
    num_splits,
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    """Log-probabilities under the raw logits: of the chosen token, and of the best ones, best
    first and equal ones by id. Grid (R,).

    logprob: [R] f32; top_ids: [R, max_top] i32; top_logprobs: [R, max_top] f32; token: [R] i32;
    sums: [R, num_splits] i64; top: [R, num_splits, max_top] i64; num_top: [R] i32, at most the
    vocabulary, -1 where no log-probability is wanted and nothing is written.
    """
    i_r = tl.program_id(0).to(tl.int64)
    n = tl.load(num_top + i_r)
    if n != NONE:
        b_sum = tl.zeros([BLOCK], tl.int64)
        for i in range(0, num_splits, BLOCK):
            o_s = i + tl.arange(0, BLOCK)
            b_sum += tl.load(sums + i_r * num_splits + o_s, mask=o_s < num_splits, other=0)
        max_logit = tl.load(row_max + i_r)
        log_sum = ln(tl.sum(b_sum, 0).to(tl.float32) * (1.0 / MASS_ONE))
        # A given token may be padding of the output matrix, which has no probability.
        x = _load_logits(logits + i_r * stride, tl.load(token + i_r), vocab, stride)
        tl.store(logprob + i_r, x - max_logit - log_sum)
        ranks = top + i_r * num_splits * max_top
        bound = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
        for i in range(0, n):
            bound = _best_below(ranks, bound, num_splits, n, max_top, BLOCK)
            tl.store(top_ids + i_r * max_top + i, rank_id(bound))
            value = rank_value(bound) - max_logit - log_sum
            tl.store(top_logprobs + i_r * max_top + i, value)
