"""What sampling computes in one program: noise, bounds, and the draw of a row that needs no others.

A filter is a threshold on the logits, found by bisection over their bits: a float32 whose bits are
read as an integer keeps its order (negative numbers reversed), so that 32 passes over the
candidates find the exact k-th largest logit, or the exact end of the nucleus.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl


@triton.jit
def ordered_bits(value):
    """The bits of fp32 values as int64 in the order of the values."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits + 0x80000000, -1 - bits)


@triton.jit
def compute_gumbel(word):
    """Standard Gumbel variables from 32-bit words: -log(-log(1 - u))."""
    uniform = (word.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 0.99999994)
    # log(1 - u) without cancellation: large noise, which wins, comes from small u.
    series = -uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
    return -tl.log(-tl.where(uniform < 0.004, series, tl.log(1.0 - uniform)))


@triton.jit
def compute_token_noise(
    token,  # [n]
    seed,
    position,
    choice,
):
    """The Gumbel variables of any tokens."""
    counter = (token // 4).to(tl.uint32)
    zero = counter * 0
    one, two, three, four = tl.philox(
        seed, counter, zero + position.to(tl.uint32), zero + choice.to(tl.uint32), zero
    )
    word = tl.where(
        token % 4 < 2,
        tl.where(token % 4 == 0, one, two),
        tl.where(token % 4 == 2, three, four),
    )
    return compute_gumbel(word)


@triton.jit
def compute_part_noise(
    first,  # token
    seed,
    position,
    choice,
    COUNT: tl.constexpr,
):
    """The Gumbel variables of COUNT adjacent tokens."""
    counter = (first // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32)
    zero = counter * 0
    one, two, three, four = tl.philox(
        seed, counter, zero + position.to(tl.uint32), zero + choice.to(tl.uint32), zero
    )
    return compute_gumbel(tl.reshape(tl.join(tl.join(one, three), tl.join(two, four)), [COUNT]))


@triton.jit
def select_highest(
    score,  # [n]
    token,  # [n]
):
    """The token of the highest score; of equal ones the first."""
    return tl.min(tl.where(score == tl.max(score, 0), token, 0x7FFFFFFF), 0)


@triton.jit
def find_kth_largest(
    values,  # fp32 [count]
    count,
    k,
    COUNT: tl.constexpr,  # count, rounded up to a power of two
):
    """The k-th largest value; -inf if there are fewer."""
    place = tl.arange(0, COUNT)
    value = tl.load(values + place, mask=place < count, other=float("-inf"))
    bits = ordered_bits(value)
    low, high = tl.full([], 0, tl.int64), tl.full([], 0xFFFFFFFF, tl.int64)
    while low < high:
        middle = (low + high + 1) // 2
        enough = tl.sum((bits >= middle).to(tl.int32), 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    smallest = tl.min(tl.where(bits >= low, value, float("inf")), 0)
    return tl.where(k > count, float("-inf"), smallest)


@triton.jit
def draw_of_few(
    value,  # fp32 [n], scaled logits
    token,  # [n]
    inside,  # [n], whether it is a candidate; these contain all that the filters keep
    top_k,  # 0 for no top-k
    top_p,
    seed,
    position,
    choice,
):
    """Draw from candidates that fit into registers."""
    bits = tl.where(inside, ordered_bits(value), -1)
    lowest = tl.full([], 0, tl.int64)  # of the ordered bits that are kept
    if (top_k > 0) & (top_k < tl.sum(inside.to(tl.int32), 0)):
        high = tl.full([], 0xFFFFFFFF, tl.int64)
        while lowest < high:
            middle = (lowest + high + 1) // 2
            enough = tl.sum((bits >= middle).to(tl.int32), 0) >= top_k
            lowest = tl.where(enough, middle, lowest)
            high = tl.where(enough, high, middle - 1)
    if top_p < 1.0:
        weight = tl.where(bits >= lowest, tl.exp(value), 0.0)
        wanted = top_p * tl.sum(weight, 0)
        high = tl.full([], 0xFFFFFFFF, tl.int64)
        while lowest < high:
            middle = (lowest + high) // 2
            reached = tl.sum(tl.where(bits > middle, weight, 0.0), 0) < wanted
            high = tl.where(reached, middle, high)
            lowest = tl.where(reached, lowest, middle + 1)
    noise = compute_token_noise(token, seed, position, choice)
    score = tl.where(inside & (bits >= lowest), value + noise, float("-inf"))
    return select_highest(score, token)


@triton.jit
def draw_of_row(
    logits,  # [vocab]
    candidates,  # fp32 scratch [vocab]: scaled logits that the filters may keep
    candidate_ids,  # int32 scratch [vocab]
    vocab,
    peak,
    temperature,
    log_min_p,
    top_k,  # 0 for no top-k
    top_p,
    seed,
    position,
    choice,
    BLOCK: tl.constexpr,
):
    """Draw from a whole row of any distribution."""
    place = tl.arange(0, BLOCK)
    # What top-p may keep weighs at least (1 - p) / vocab of all: the rest adds up to less.
    floor = log_min_p
    if top_k == 0:
        mass = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, vocab, BLOCK):
            value = tl.load(logits + begin + place, mask=begin + place < vocab, other=float("-inf"))
            scaled = tl.div_rn(value.to(tl.float32) - peak, temperature)
            mass += tl.where(scaled >= log_min_p, tl.exp(scaled), 0.0)
        share = (1.0 - top_p) * 0.999 * tl.sum(mass, 0) / vocab
        floor = tl.where(top_p < 1.0, tl.maximum(floor, tl.log(share)), floor)
    count = 0
    for begin in range(0, vocab, BLOCK):
        inside = begin + place < vocab
        value = tl.load(logits + begin + place, mask=inside, other=float("-inf"))
        scaled = tl.div_rn(value.to(tl.float32) - peak, temperature)
        kept = inside & (scaled >= floor)
        rank = count + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(candidates + rank, scaled, mask=kept)
        tl.store(candidate_ids + rank, begin + place, mask=kept)
        count += tl.sum(kept.to(tl.int32), 0)
    tl.debug_barrier()
    lowest = tl.full([], 0, tl.int64)  # of the ordered bits that are kept
    if (top_k > 0) & (top_k < count):
        high = tl.full([], 0xFFFFFFFF, tl.int64)
        while lowest < high:
            middle = (lowest + high + 1) // 2
            at_least = tl.zeros([BLOCK], tl.int32)
            for begin in range(0, count, BLOCK):
                value = tl.load(
                    candidates + begin + place, mask=begin + place < count, other=float("-inf")
                )
                at_least += ((begin + place < count) & (ordered_bits(value) >= middle)).to(tl.int32)
            enough = tl.sum(at_least, 0) >= top_k
            lowest = tl.where(enough, middle, lowest)
            high = tl.where(enough, high, middle - 1)
    if top_p < 1.0:
        mass = tl.zeros([BLOCK], tl.float32)
        if top_k == 0:
            for begin in range(0, vocab, BLOCK):
                value = tl.load(
                    logits + begin + place, mask=begin + place < vocab, other=float("-inf")
                )
                scaled = tl.div_rn(value.to(tl.float32) - peak, temperature)
                mass += tl.where(scaled >= log_min_p, tl.exp(scaled), 0.0)
        else:
            for begin in range(0, count, BLOCK):
                value = tl.load(
                    candidates + begin + place, mask=begin + place < count, other=float("-inf")
                )
                mass += tl.where(ordered_bits(value) >= lowest, tl.exp(value), 0.0)
        wanted = top_p * tl.sum(mass, 0)
        # The lowest threshold with less than `wanted` strictly above it.
        low, high = lowest, tl.full([], 0xFFFFFFFF, tl.int64)
        while low < high:
            middle = (low + high) // 2
            above = tl.zeros([BLOCK], tl.float32)
            for begin in range(0, count, BLOCK):
                value = tl.load(
                    candidates + begin + place, mask=begin + place < count, other=float("-inf")
                )
                above += tl.where(ordered_bits(value) > middle, tl.exp(value), 0.0)
            reached = tl.sum(above, 0) < wanted
            high = tl.where(reached, middle, high)
            low = tl.where(reached, low, middle + 1)
        lowest = low
    best_score = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, count, BLOCK):
        inside = begin + place < count
        value = tl.load(candidates + begin + place, mask=inside, other=float("-inf"))
        token = tl.load(candidate_ids + begin + place, mask=inside, other=0)
        kept = inside & (ordered_bits(value) >= lowest)
        score = tl.where(
            kept, value + compute_token_noise(token, seed, position, choice), float("-inf")
        )
        better = score > best_score
        best_score = tl.where(better, score, best_score)
        best_id = tl.where(better, token, best_id)
    return select_highest(best_score, best_id)
