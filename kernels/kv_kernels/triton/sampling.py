"""Token sampling in Triton: greedy, temperature, min-p, top-k and top-p, without sorting.

One program samples one row. A filter is a threshold on the logits, found by bisection over their
bits: a float32 whose bits are read as an integer keeps its order (negative numbers reversed), so
that 32 passes over the candidates find the exact k-th largest logit, or the exact end of the
nucleus. `draw_token` in node_engine/model/sampling/sampler.py computes the same in NumPy.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # logits that one program processes at a time; a multiple of 4


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What the rows of a step ask for. All tensors are [rows], on the device of the logits."""

    temperature: torch.Tensor  # fp32; 0 for greedy
    log_min_p: torch.Tensor  # fp32; -inf for no min-p
    top_k: torch.Tensor  # int32; 0 for no top-k
    top_p: torch.Tensor  # fp32; 1 for no top-p
    seed: torch.Tensor  # int64
    position: torch.Tensor  # int32, index of the token in prompt + output
    choice: torch.Tensor  # int32, number of the choice in its request


@triton.jit
def _ordered_bits(value):
    """The bits of fp32 values as int64 in the order of the values."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits + 0x80000000, -1 - bits)


@triton.jit
def _gumbel(word):
    """Standard Gumbel variables from 32-bit words: -log(-log(1 - u))."""
    uniform = (word.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 0.99999994)
    # log(1 - u) without cancellation: large noise, which wins, comes from small u.
    series = -uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
    return -tl.log(-tl.where(uniform < 0.004, series, tl.log(1.0 - uniform)))


# grid: [rows]
@triton.jit
def _sample_kernel(
    logits,  # [rows, vocab], rows contiguous
    candidates,  # fp32 scratch [rows, vocab]: scaled logits that the filters may keep
    candidate_ids,  # int32 scratch [rows, vocab]
    temperatures,
    log_min_ps,
    top_ks,
    top_ps,
    seeds,
    positions,
    choices,
    tokens,  # int64 [rows]: the result, -1 if the row has no finite maximum
    vocab,
    row_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    candidates += row * vocab
    candidate_ids += row * vocab
    place = tl.arange(0, BLOCK)
    # The best token; of equal ones the first.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    has_nan = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, vocab, BLOCK):
        value = tl.load(logits + begin + place, mask=begin + place < vocab, other=float("-inf"))
        value = value.to(tl.float32)
        has_nan += (value != value).to(tl.int32)
        better = value > best
        best = tl.where(better, value, best)
        best_id = tl.where(better, begin + place, best_id)
    peak = tl.max(best, 0)
    first = tl.min(tl.where(best == peak, best_id, 0x7FFFFFFF), 0)
    ok = (tl.sum(has_nan, 0) == 0) & (peak > float("-inf")) & (peak < float("inf"))
    temperature = tl.load(temperatures + row)
    if (temperature == 0.0) | (ok == 0):
        tl.store(tokens + row, tl.where(ok, first, -1).to(tl.int64))
        return
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    position, choice = tl.load(positions + row), tl.load(choices + row)
    log_min_p, top_k = tl.load(log_min_ps + row), tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    top_k = tl.where(top_k >= vocab, 0, top_k)
    best_score = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    if (log_min_p == float("-inf")) & (top_k == 0) & (top_p >= 1.0):
        quarter = tl.arange(0, BLOCK // 4)
        for begin in range(0, vocab, BLOCK):
            counter = (begin // 4 + quarter).to(tl.uint32)
            zero = counter * 0
            one, two, three, four = tl.philox(
                seed, counter, zero + position.to(tl.uint32), zero + choice.to(tl.uint32), zero
            )
            word = tl.reshape(tl.join(tl.join(one, three), tl.join(two, four)), [BLOCK])
            inside = begin + place < vocab
            value = tl.load(logits + begin + place, mask=inside, other=float("-inf"))
            scaled = tl.div_rn(value.to(tl.float32) - peak, temperature)
            score = tl.where(inside, scaled + _gumbel(word), float("-inf"))
            better = score > best_score
            best_score = tl.where(better, score, best_score)
            best_id = tl.where(better, begin + place, best_id)
    else:
        # What top-p may keep weighs at least (1 - p) / vocab of all: the rest adds up to less.
        floor = log_min_p
        if top_k == 0:
            mass = tl.zeros([BLOCK], tl.float32)
            for begin in range(0, vocab, BLOCK):
                value = tl.load(
                    logits + begin + place, mask=begin + place < vocab, other=float("-inf")
                )
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
                    at_least += ((begin + place < count) & (_ordered_bits(value) >= middle)).to(
                        tl.int32
                    )
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
                    mass += tl.where(_ordered_bits(value) >= lowest, tl.exp(value), 0.0)
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
                    above += tl.where(_ordered_bits(value) > middle, tl.exp(value), 0.0)
                reached = tl.sum(above, 0) < wanted
                high = tl.where(reached, middle, high)
                low = tl.where(reached, low, middle + 1)
            lowest = low
        for begin in range(0, count, BLOCK):
            inside = begin + place < count
            value = tl.load(candidates + begin + place, mask=inside, other=float("-inf"))
            token = tl.load(candidate_ids + begin + place, mask=inside, other=0)
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
            kept = inside & (_ordered_bits(value) >= lowest)
            score = tl.where(kept, value + _gumbel(word), float("-inf"))
            better = score > best_score
            best_score = tl.where(better, score, best_score)
            best_id = tl.where(better, token, best_id)
    top = tl.max(best_score, 0)
    chosen = tl.min(tl.where(best_score == top, best_id, 0x7FFFFFFF), 0)
    tl.store(tokens + row, chosen.to(tl.int64))


def sample_rows(
    logits: torch.Tensor,  # [rows, vocab]
    rows: SamplingRows,
) -> torch.Tensor:  # int64 [rows]
    """Sample a token for each row, or -1 where a row has no finite maximum."""
    count, vocab = logits.shape
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    candidates = torch.empty(count, vocab, dtype=torch.float32, device=logits.device)
    candidate_ids = torch.empty(count, vocab, dtype=torch.int32, device=logits.device)
    _sample_kernel[(count,)](
        logits,
        candidates,
        candidate_ids,
        rows.temperature,
        rows.log_min_p,
        rows.top_k,
        rows.top_p,
        rows.seed,
        rows.position,
        rows.choice,
        tokens,
        vocab,
        logits.stride(0),
        BLOCK=_BLOCK,
        num_warps=16,
    )
    return tokens
