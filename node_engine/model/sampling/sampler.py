"""Samples tokens: greedy, or Gumbel-max over the filtered distribution with counter-based noise.

The logits of a row are processed in this order; each step only if the row's parameters ask for it:

    repetition penalty      Keskar et al. 2019 (CTRL), over prompt and output: a positive logit is
                            divided by it, any other multiplied, as in Hugging Face and vLLM
    frequency and presence  as OpenAI's: minus frequency_penalty for each occurrence of the token in
                            the output, minus presence_penalty if it occurs at all
    logit_bias              as OpenAI's: added, not scaled by any penalty
    forbidden tokens        minus infinity: tokens that may not be sampled yet, and all that the
                            grammar of the output does not allow; the best token after this step is
                            the greedy result
    temperature             divides the logits
    min_p                   Nguyen et al. 2024: keeps tokens that are at least min_p times as likely
                            as the most likely one
    top_k, then top_p       applied to the tokens that min_p has kept, as in vLLM

Logprobs are computed from the logits before any of these steps.

Noise is a function of (seed, choice, absolute position, token id) alone, so that a request samples
the same tokens alone or in a batch, resumed, and on any node. Gumbel-max is used rather than
inversion of the cumulative distribution: logits that differ by rounding (another batch, another
chunking) then change the token only if the two best scores are that close, while inversion has one
such boundary per token of the vocabulary.

Without a device that draws, rows are copied to the host in float32: NumPy finds the maximum of
vectors of this size, sorts and multiplies them several times faster than torch's CPU operators.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.errors import NodeFailed
from baton.types import SamplingParams
from node_engine.core.step.step_batch import SampleSpec, SliceResult
from node_engine.model.sampling.logprobs import compute_logprobs
from node_engine.model.sampling.philox import WORD_MASK, Words, philox4x32
from node_engine.model.sampling.token_masks import apply_masks

Floats = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]
# Draws a token for each row of [rows, vocab].
PickTokens = Callable[[torch.Tensor, Sequence[SampleSpec]], list[int]]

_PER_COUNTER = 4  # token ids that share a counter, one word each


def sample_tokens(
    logits: torch.Tensor,  # [rows, vocab], overwritten
    specs: Sequence[SampleSpec],  # one per row
    pick_tokens: PickTokens | None = None,
) -> list[SliceResult]:
    """Sample one token per row, with logprobs where requested.

    `pick_tokens` applies temperature and filters, and draws; None for `draw_token` on the host.

    Raises NodeFailed if a row has no finite maximum.
    """
    pick_tokens = pick_tokens or _pick_tokens
    special = [row for row, spec in enumerate(specs) if needs_extra_steps(spec)]
    if not special:
        return [SliceResult(token) for token in pick_tokens(logits, specs)]
    scored = [row for row in special if specs[row].params.logprobs is not None]
    raw = logits[scored].float()
    tokens = pick_tokens(_adjust_logits(logits, [(row, specs[row]) for row in special]), specs)
    found = compute_logprobs(
        raw, [tokens[row] for row in scored], [specs[row].params.logprobs or 0 for row in scored]
    )
    by_row = dict(zip(scored, found, strict=True))
    return [SliceResult(token, by_row.get(row)) for row, token in enumerate(tokens)]


def needs_extra_steps(spec: SampleSpec) -> bool:
    """Whether a row needs more than temperature and filters; other rows skip the extra work."""
    params = spec.params
    return (
        spec.token_counts is not None
        or bool(spec.forbidden_token_ids or params.logit_bias)
        or spec.mask is not None
        or params.logprobs is not None
    )


def _pick_tokens(
    logits: torch.Tensor, specs: Sequence[SampleSpec]
) -> list[int]:  # logits [rows, vocab]
    rows = logits.to("cpu", torch.float32).numpy()
    tokens: list[int] = rows.argmax(-1).tolist()  # of a row with NaNs, the first of them
    for row, (token, spec) in enumerate(zip(tokens, specs, strict=True)):
        if not math.isfinite(rows[row, token]):
            raise damaged_logits_error()
        if np.float32(spec.params.temperature) > 0:
            tokens[row] = draw_token(rows[row], spec)
    return tokens


def damaged_logits_error() -> NodeFailed:
    """For a row whose greatest logit is not finite."""
    return NodeFailed("logits are not finite: the model's weights or its KV cache are damaged")


def _adjust_logits(logits: torch.Tensor, rows: Sequence[tuple[int, SampleSpec]]) -> torch.Tensor:
    """Apply penalties, bias, forbidden tokens and masks to rows of [rows, vocab]; returns them all.

    Works in place or, where arithmetic needs it, on a float32 copy. All operations are elementwise:
    the result of a row does not depend on other rows.
    """
    counted = [(row, spec) for row, spec in rows if spec.token_counts is not None]
    biased = [(row, spec.params.logit_bias) for row, spec in rows if spec.params.logit_bias]
    if counted or biased:
        logits = logits.float()
    if counted:
        _apply_penalties(logits, counted)
    for row, pairs in biased:
        ids, biases = zip(*pairs, strict=True)
        logits[row].index_add_(
            0, _to_device(logits, np.array(ids)), _to_device(logits, np.array(biases, np.float32))
        )
    for row, spec in rows:
        if spec.forbidden_token_ids:
            logits[
                row, [token for token in spec.forbidden_token_ids if token < logits.shape[1]]
            ] = -math.inf
    apply_masks(logits, [(row, spec.mask) for row, spec in rows if spec.mask is not None])
    return logits


def _apply_penalties(logits: torch.Tensor, rows: Sequence[tuple[int, SampleSpec]]) -> None:
    """Apply the penalties of all rows at once, with one gather and one scatter."""
    counts = [spec.token_counts for _, spec in rows if spec.token_counts is not None]
    lengths = [len(count.token_ids) for count in counts]

    def per_token(values: Sequence[float], dtype: type = np.float32) -> torch.Tensor:
        return _to_device(logits, np.repeat(np.array(values, dtype), lengths))

    params = [spec.params for _, spec in rows]
    places = (
        per_token([row for row, _ in rows], np.int64),
        _to_device(logits, np.concatenate([count.token_ids for count in counts])),
    )
    in_output = _to_device(logits, np.concatenate([count.output_counts for count in counts]))
    repetition = per_token([param.repetition_penalty for param in params])
    values = logits[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= per_token([param.frequency_penalty for param in params]) * in_output
    values -= per_token([param.presence_penalty for param in params]) * (in_output > 0)
    logits[places] = values


def _to_device(logits: torch.Tensor, values: npt.NDArray[np.int64] | Floats) -> torch.Tensor:
    return torch.from_numpy(values).to(logits.device)


def draw_token(logits: Floats, spec: SampleSpec) -> int:  # logits [vocab]
    """Sample softmax(logits / temperature), restricted by min_p, then top-k, then top-p.

    The temperature must be above 0 as a float32, in which it divides.
    """
    # A tiny temperature sends all logits but the best to -inf, as intended.
    with np.errstate(over="ignore"):
        scaled = (logits - logits.max()) / np.float32(spec.params.temperature)
    floor = _lowest_kept_logit(scaled, spec.params)
    if floor is None:
        return int(np.argmax(scaled + compute_gumbel_noise(len(scaled), spec)))
    kept = np.flatnonzero(scaled >= floor)
    return int(kept[np.argmax(scaled[kept] + compute_gumbel_noise(len(scaled), spec, kept))])


def _lowest_kept_logit(scaled: Floats, params: SamplingParams) -> np.float32 | None:
    """The lowest logit that min_p, top-k and top-p keep; None for no bound.

    The highest of `scaled` is 0. Logits equal to the bound are all kept, so that the result does
    not depend on the order of equal elements in a sort.
    """
    floor = None
    if params.min_p > 0.0:
        floor = np.float32(math.log(params.min_p))
        scaled = scaled[scaled >= floor]
    if 0 < params.top_k < len(scaled):
        floor = np.partition(scaled, -params.top_k)[-params.top_k]
        scaled = scaled[scaled >= floor]
    if params.top_p < 1.0:
        weights = np.exp(scaled)
        total = weights.sum(dtype=np.float64)
        # Tokens with smaller weights add up to less than 1 - top_p: no need to sort them.
        ranked = np.sort(scaled[weights >= (1.0 - params.top_p) * total / len(scaled)])[::-1]
        before = np.cumsum(np.exp(ranked), dtype=np.float64) - np.exp(ranked)
        floor = ranked[max(1, int(np.count_nonzero(before < params.top_p * total))) - 1]
    return floor


def compute_gumbel_noise(
    vocab_size: int,
    spec: SampleSpec,
    tokens: TokenIds | None = None,  # [n], all of the vocabulary when None
) -> Floats:  # [n]
    """Independent standard Gumbel variables, functions of seed, choice, position and token id.

    Computed as -log(-log(1 - u)) from 32-bit uniforms u: large values, which win, come from small
    u, where a float is finest.
    """
    if tokens is not None and len(tokens) * _PER_COUNTER < vocab_size:
        words = np.stack(_noise_words(tokens // _PER_COUNTER, spec))[
            tokens % _PER_COUNTER, np.arange(len(tokens))
        ]
    else:
        counters = np.arange(-(-vocab_size // _PER_COUNTER))
        words = np.stack(_noise_words(counters, spec), -1).reshape(-1)[:vocab_size]
        words = words if tokens is None else words[tokens]
    uniform = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    below_one = np.minimum(uniform, np.float32(1.0 - 2.0**-24))
    noise: Floats = -np.log(-np.log1p(-below_one))
    return noise


def _noise_words(counters: TokenIds, spec: SampleSpec) -> tuple[Words, Words, Words, Words]:
    """Philox at (token id / 4, position, choice, 0) under the 64 bits of the seed."""
    zero = np.zeros(len(counters), dtype=np.uint64)
    position, choice = (
        zero + np.uint64(spec.position & WORD_MASK),
        zero + np.uint64(spec.choice_index & WORD_MASK),
    )
    key = (spec.params.seed & WORD_MASK, spec.params.seed >> 32 & WORD_MASK)
    return philox4x32((counters.astype(np.uint64), position, choice, zero), key)
