"""Token sampling in Triton: greedy, temperature, min-p, top-k and top-p, without sorting.

The vocabulary of a row is divided into parts, one program each; the grids depend on nothing but the
number of rows, so that a captured graph serves every step. A program ends early if its row has
nothing left to compute:

    peaks      the best logit of each part; greedy rows need no more
    draw       adds Gumbel noise and finds the best token of each part; for a row with top-k, the
               tokens that may be among the k best instead, which are few
    weigh      for a row with top-p: the probability of all tokens that are more likely than the
               drawn one. The draw is one from the nucleus if that is less than p. Otherwise only
               these tokens are left, and the next round draws from them: rejection sampling, whose
               result is that of a draw from the nucleus with the same noise
    choose     combines the parts; a row that no round has settled is drawn by one program

`draw_token` in node_engine/model/sampling/sampler.py computes the same in NumPy.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kv_kernels.triton.row_sampling import (
    compute_part_noise,
    draw_of_few,
    draw_of_row,
    find_kth_largest,
    select_highest,
)

_PART = 4096  # logits of one program
_GROUP = 64  # logits of which the best bounds what top-k may keep
_FEW = 1024  # candidates of top-k that one program keeps in registers
_ROUNDS = 3  # a round leaves a row unsettled with a probability of 1 - top_p


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


# grid: [rows, parts]
@triton.jit
def _peaks_kernel(
    logits,  # [rows, vocab], rows contiguous
    top_ks,
    peaks,  # fp32 [rows, parts]; infinite if the part is damaged
    peak_ids,  # int32 [rows, parts]; of equal peaks the first
    group_peaks,  # fp32 [rows, parts, PART / GROUP], of rows with top-k
    vocab,
    row_stride,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    value = tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf"))
    value = value.to(tl.float32)
    has_nan = tl.sum((value != value).to(tl.int32), 0) > 0
    cell = row * tl.num_programs(1) + part
    tl.store(peaks + cell, tl.where(has_nan, float("inf"), tl.max(value, 0)))
    tl.store(peak_ids + cell, select_highest(value, token))
    if tl.load(top_ks + row) > 0:
        groups = tl.max(tl.reshape(value, [PART // GROUP, GROUP]), 1)
        tl.store(group_peaks + cell * (PART // GROUP) + tl.arange(0, PART // GROUP), groups)


@triton.jit
def _load_peak(peaks, row, parts, PARTS: tl.constexpr):
    """The row's best logit, and whether it is finite and no logit is NaN."""
    part = tl.arange(0, PARTS)
    found = tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf"))
    peak = tl.max(found, 0)
    return peak, (peak > float("-inf")) & (peak < float("inf"))


@triton.jit
def _load_draw(
    scores,  # fp32 [..., parts]
    ids,  # int32
    scaled_logits,  # fp32
    cell,  # of the first part
    parts,
    PARTS: tl.constexpr,
):
    """What a round has drawn for a row: score (-inf if it was settled before), token and logit."""
    part = tl.arange(0, PARTS)
    inside = part < parts
    score = tl.load(scores + cell + part, mask=inside, other=float("-inf"))
    token = tl.load(ids + cell + part, mask=inside, other=0x7FFFFFFF)
    chosen = select_highest(score, token)
    scaled = tl.load(scaled_logits + cell + part, mask=inside, other=float("-inf"))
    return tl.max(score, 0), chosen, tl.max(tl.where(token == chosen, scaled, float("-inf")), 0)


@triton.jit
def _is_in_nucleus(
    masses,  # fp32 [..., parts, 2]
    cell,  # of the first part
    parts,
    top_p,
    PARTS: tl.constexpr,
):
    """Whether the tokens that are more likely than the drawn one have less than `top_p`."""
    part = tl.arange(0, PARTS)
    above = tl.load(masses + (cell + part) * 2, mask=part < parts, other=0.0)
    total = tl.load(masses + (cell + part) * 2 + 1, mask=part < parts, other=0.0)
    return tl.sum(above, 0) < top_p * tl.sum(total, 0)


# grid: [rows, parts]
@triton.jit
def _draw_kernel(
    logits,  # [rows, vocab], rows contiguous
    temperatures,
    log_min_ps,
    top_ks,
    top_ps,
    seeds,
    positions,
    choices,
    peaks,
    group_peaks,
    candidates,  # fp32 [rows, parts, PART]: scaled logits that top-k may keep
    candidate_ids,  # int32 [rows, parts, PART]
    candidate_counts,  # int32 [rows, parts]
    scores,  # fp32 [rounds, rows, parts]
    ids,  # int32 [rounds, rows, parts]
    scaled_logits,  # fp32 [rounds, rows, parts]
    masses,  # fp32 [rounds, rows, parts, 2]
    round_index,
    vocab,
    row_stride,
    PART: tl.constexpr,
    PARTS: tl.constexpr,  # parts, rounded up to a power of two
    GROUP: tl.constexpr,
    IS_FIRST: tl.constexpr,  # round
):
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    log_min_p, top_p = tl.load(log_min_ps + row), tl.load(top_ps + row)
    peak, is_ok = _load_peak(peaks, row, parts, PARTS)
    top_k = tl.where(top_k >= vocab, 0, top_k)
    is_drawn = (temperature > 0.0) & is_ok
    if not IS_FIRST:
        is_drawn = is_drawn & (top_k == 0) & (top_p < 1.0)
    if is_drawn == 0:
        return
    low = float("-inf")  # tokens up to here are not in the nucleus
    if not IS_FIRST:
        before = ((round_index - 1) * tl.num_programs(0) + row) * parts
        last_score, _, low = _load_draw(scores, ids, scaled_logits, before, parts, PARTS)
        # Masses of a round are only read if it has drawn: otherwise nobody has written them.
        if last_score == float("-inf"):
            low = float("inf")
        elif _is_in_nucleus(masses, before, parts, top_p, PARTS):
            low = float("inf")
    token = part * PART + tl.arange(0, PART)
    inside = token < vocab
    value = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf"))
    scaled = tl.div_rn(value.to(tl.float32) - peak, temperature)
    kept = inside & (scaled >= log_min_p)
    cell = row * parts + part
    if top_k > 0:
        groups = parts * (PART // GROUP)
        bound = find_kth_largest(group_peaks + row * groups, groups, top_k, PARTS * (PART // GROUP))
        kept = kept & (scaled >= tl.div_rn(bound - peak, temperature))
        place = cell * PART + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(candidates + place, scaled, mask=kept)
        tl.store(candidate_ids + place, token, mask=kept)
        tl.store(candidate_counts + cell, tl.sum(kept.to(tl.int32), 0))
    else:
        kept = kept & (scaled > low)
        seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
        position, choice = tl.load(positions + row), tl.load(choices + row)
        noise = compute_part_noise(part * PART, seed, position, choice, PART)
        score = tl.where(kept, scaled + noise, float("-inf"))
        chosen = select_highest(score, token)
        cell += round_index * tl.num_programs(0) * parts
        tl.store(scores + cell, tl.max(score, 0))
        tl.store(ids + cell, chosen)
        tl.store(scaled_logits + cell, tl.max(tl.where(token == chosen, scaled, float("-inf")), 0))


# grid: [rows, parts]
@triton.jit
def _weigh_kernel(
    logits,
    temperatures,
    log_min_ps,
    top_ks,
    top_ps,
    peaks,
    scores,
    ids,
    scaled_logits,
    masses,  # fp32 [rounds, rows, parts, 2]: of the tokens above the drawn one, and of all
    round_index,
    vocab,
    row_stride,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    peak, is_ok = _load_peak(peaks, row, parts, PARTS)
    top_k = tl.where(top_k >= vocab, 0, top_k)
    is_drawn = (temperature > 0.0) & is_ok & (top_k == 0) & (tl.load(top_ps + row) < 1.0)
    if is_drawn == 0:
        return
    cell = (round_index * tl.num_programs(0) + row) * parts
    score, _, low = _load_draw(scores, ids, scaled_logits, cell, parts, PARTS)
    if score == float("-inf"):
        return
    token = part * PART + tl.arange(0, PART)
    inside = token < vocab
    value = tl.load(logits + row * row_stride + token, mask=inside, other=float("-inf"))
    scaled = tl.div_rn(value.to(tl.float32) - peak, temperature)
    kept = inside & (scaled >= tl.load(log_min_ps + row))
    weight = tl.where(kept, tl.exp(scaled), 0.0)
    tl.store(masses + (cell + part) * 2, tl.sum(tl.where(scaled > low, weight, 0.0), 0))
    tl.store(masses + (cell + part) * 2 + 1, tl.sum(weight, 0))


# grid: [rows]
@triton.jit
def _choose_kernel(
    logits,
    temperatures,
    log_min_ps,
    top_ks,
    top_ps,
    seeds,
    positions,
    choices,
    peaks,
    peak_ids,
    candidates,
    candidate_ids,
    candidate_counts,
    scores,
    ids,
    scaled_logits,
    masses,
    tokens,  # int64 [rows]: the result, -1 if the row has no finite maximum
    vocab,
    parts,
    row_stride,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    FEW: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    temperature = tl.load(temperatures + row)
    peak, is_ok = _load_peak(peaks, row, parts, PARTS)
    if (temperature == 0.0) | (is_ok == 0):
        part = tl.arange(0, PARTS)
        cells_ok = part < parts
        found = tl.load(peaks + row * parts + part, mask=cells_ok, other=float("-inf"))
        best_ids = tl.load(peak_ids + row * parts + part, mask=cells_ok, other=0x7FFFFFFF)
        tl.store(tokens + row, tl.where(is_ok, select_highest(found, best_ids), -1).to(tl.int64))
        return
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    top_k = tl.where(top_k >= vocab, 0, top_k)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    position, choice = tl.load(positions + row), tl.load(choices + row)
    chosen = tl.full([], -1, tl.int32)
    if top_k > 0:
        place = tl.arange(0, FEW)
        source = place * 0
        count = 0
        for part in range(parts):
            kept = tl.load(candidate_counts + row * parts + part)
            inside = (place >= count) & (place < count + kept)
            source = tl.where(inside, part * PART + place - count, source)
            count += kept
        if count <= FEW:
            is_used = place < count
            cell = row * parts * PART + source
            value = tl.load(candidates + cell, mask=is_used, other=float("-inf"))
            ids_of_few = tl.load(candidate_ids + cell, mask=is_used, other=0x7FFFFFFF)
            chosen = draw_of_few(value, ids_of_few, is_used, top_k, top_p, seed, position, choice)
    else:
        for round_index in tl.static_range(ROUNDS):
            if chosen < 0:
                first = (round_index * rows + row) * parts
                score, drawn, _ = _load_draw(scores, ids, scaled_logits, first, parts, PARTS)
                if top_p >= 1.0:
                    chosen = drawn
                elif (score > float("-inf")) & _is_in_nucleus(masses, first, parts, top_p, PARTS):
                    chosen = drawn
    if chosen < 0:
        chosen = draw_of_row(
            logits + row * row_stride,
            candidates + row * parts * PART,
            candidate_ids + row * parts * PART,
            vocab,
            peak,
            temperature,
            tl.load(log_min_ps + row),
            top_k,
            top_p,
            seed,
            position,
            choice,
            PART,
        )
    tl.store(tokens + row, chosen.to(tl.int64))


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What the launches of one call share; see the kernels."""

    peaks: torch.Tensor
    peak_ids: torch.Tensor
    group_peaks: torch.Tensor
    candidates: torch.Tensor
    candidate_ids: torch.Tensor
    candidate_counts: torch.Tensor
    scores: torch.Tensor
    ids: torch.Tensor
    scaled_logits: torch.Tensor
    masses: torch.Tensor

    @staticmethod
    def allocate(rows: int, parts: int, device: torch.device) -> "_Scratch":
        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return _Scratch(
            peaks=floats(rows, parts),
            peak_ids=ints(rows, parts),
            group_peaks=floats(rows, parts, _PART // _GROUP),
            candidates=floats(rows, parts, _PART),
            candidate_ids=ints(rows, parts, _PART),
            candidate_counts=ints(rows, parts),
            scores=floats(_ROUNDS, rows, parts),
            ids=ints(_ROUNDS, rows, parts),
            scaled_logits=floats(_ROUNDS, rows, parts),
            masses=floats(_ROUNDS, rows, parts, 2),
        )


def sample_rows(
    logits: torch.Tensor,  # [rows, vocab]
    asked: SamplingRows,
) -> torch.Tensor:  # int64 [rows]
    """Sample a token for each row, or -1 where a row has no finite maximum."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _PART)
    sizes = {"PART": _PART, "PARTS": triton.next_power_of_2(parts)}
    scratch = _Scratch.allocate(rows, parts, logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    filters = (asked.temperature, asked.log_min_p, asked.top_k, asked.top_p)
    noise = (asked.seed, asked.position, asked.choice)
    draws = (scratch.scores, scratch.ids, scratch.scaled_logits, scratch.masses)
    candidates = (scratch.candidates, scratch.candidate_ids, scratch.candidate_counts)
    stride = logits.stride(0)
    _peaks_kernel[(rows, parts)](
        logits, asked.top_k, scratch.peaks, scratch.peak_ids, scratch.group_peaks, vocab, stride,
        PART=_PART, GROUP=_GROUP, num_warps=8,
    )  # fmt: skip
    for round_index in range(_ROUNDS):
        _draw_kernel[(rows, parts)](
            logits, *filters, *noise, scratch.peaks, scratch.group_peaks, *candidates, *draws,
            round_index, vocab, stride, **sizes, GROUP=_GROUP, IS_FIRST=round_index == 0,
            num_warps=8,
        )  # fmt: skip
        _weigh_kernel[(rows, parts)](
            logits, *filters, scratch.peaks, *draws, round_index, vocab, stride,
            **sizes, num_warps=8,
        )  # fmt: skip
    _choose_kernel[(rows,)](
        logits, *filters, *noise, scratch.peaks, scratch.peak_ids, *candidates, *draws, tokens,
        vocab, parts, stride, **sizes, FEW=_FEW, ROUNDS=_ROUNDS, num_warps=8,
    )  # fmt: skip
    return tokens
