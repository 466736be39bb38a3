"""Drawing tokens: greedy, or Gumbel-max over the filtered distribution with counter-based noise.

Noise is a function of (seed, choice, absolute position, token id) and nothing else, so that a request draws the same
tokens alone or in a batch, resumed, on any node. Gumbel-max rather than inversion of the cumulative distribution:
logits that differ by rounding (another batch, another chunking) then change the token only when the two best scores are
that close, while an inversion over V tokens has V boundaries that each may move.
"""

import math
from collections.abc import Sequence

import torch

from baton.errors import NodeFailed
from baton.types import SamplingParams
from node_engine.core.step import SampleSpec
from node_engine.model.philox import MASK, philox4x32

_TOP_P_FIRST = 1024  # tokens sorted at first; all of them when the nucleus is larger
_WORDS = 4  # tokens per counter


def sample(
    logits: torch.Tensor,  # [rows, vocab]; overwritten
    specs: Sequence[SampleSpec],  # one per row
) -> list[int]:
    """One token id per row. Raises NodeFailed when a row's logits are not finite."""
    for row, spec in enumerate(specs):
        if spec.forbidden:
            logits[row, list(spec.forbidden)] = -math.inf
    best, tokens = logits.max(-1)
    if not bool(torch.isfinite(best).all()):
        raise NodeFailed("the model's logits are not finite: the weights or the cache are damaged")
    for row, spec in enumerate(specs):
        if spec.params.temperature > 0:
            tokens[row] = _draw(logits[row].to(torch.float32), spec)
    drawn: list[int] = tokens.tolist()
    return drawn


def _draw(logits: torch.Tensor, spec: SampleSpec) -> torch.Tensor:
    scaled = logits / spec.params.temperature
    scaled -= scaled.max()
    kept = _kept(scaled, spec.params)
    if kept is None:
        return (scaled - log_exponential(torch.arange(len(scaled), device=scaled.device), spec)).argmax()
    return kept[(scaled[kept] - log_exponential(kept, spec)).argmax()]


def _kept(scaled: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """Ids that top-k and then top-p leave, ascending; None for all. Ids that tie with the last one kept are kept, so
    that the order in which equals are sorted does not matter."""
    floor = -math.inf
    if 0 < params.top_k < len(scaled):
        floor = float(scaled.topk(params.top_k).values[-1])
        scaled = scaled.masked_fill(scaled < floor, -math.inf)
    if params.top_p < 1.0:
        floor = max(floor, _nucleus_floor(scaled, params.top_p))
    return None if floor == -math.inf else torch.nonzero(scaled >= floor).view(-1)


def _nucleus_floor(scaled: torch.Tensor, top_p: float) -> float:
    """The smallest score in the least set of most probable tokens whose probability reaches `top_p`."""
    total = torch.logsumexp(scaled, 0)
    for count in (min(_TOP_P_FIRST, len(scaled)), len(scaled)):
        ranked = scaled.topk(count).values
        before = (ranked - total).exp_().cumsum(0)
        inside = int((before < top_p).sum())  # those whose predecessors, and they, do not reach it yet
        if inside < count:
            return float(ranked[inside])
    return float(ranked[-1])


def log_exponential(
    tokens: torch.Tensor,  # int64 [n], token ids
    spec: SampleSpec,
) -> torch.Tensor:  # fp32 [n]
    """Logarithms of independent Exp(1) variables, the negative of Gumbel noise.

    One counter gives four words, for ids 4n .. 4n + 3. Small variables win, and those keep all 32 bits.
    """
    first = int(tokens[0]) // _WORDS if len(tokens) else 0
    contiguous = len(tokens) > 0 and int(tokens[-1]) - int(tokens[0]) + 1 == len(tokens)
    key = (spec.params.seed & MASK, spec.params.seed >> 32 & MASK)
    if contiguous:
        counters = torch.arange(first, int(tokens[-1]) // _WORDS + 1, device=tokens.device)
    else:
        counters = tokens // _WORDS
    position = torch.full_like(counters, spec.position & MASK)
    choice = torch.full_like(counters, spec.choice & MASK)
    words = philox4x32((counters, position, choice, torch.zeros_like(counters)), key)
    if contiguous:
        start = int(tokens[0]) - first * _WORDS
        word = torch.stack(words, -1).view(-1)[start : start + len(tokens)]
    else:
        word = torch.stack(words, -1).gather(1, (tokens % _WORDS)[:, None]).view(-1)
    uniform = (word.to(torch.float32) + 0.5) * 2.0**-32
    return torch.log1p(-uniform.clamp_(max=1.0 - 2.0**-24)).neg_().log_()
