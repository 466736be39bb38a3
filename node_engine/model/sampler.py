"""Drawing tokens: greedy, or Gumbel-max over the filtered distribution with counter-based noise.

Noise is a function of (seed, choice, absolute position, token id) and of nothing else, so that a request
draws the same tokens alone or in a batch, resumed, and on any node. Gumbel-max rather than inversion of the
cumulative distribution: logits that differ by rounding (another batch, another chunking) then change the
token only if the two best scores are that close, while inversion has one such boundary per token of the
vocabulary.

Drawn rows go to the host: NumPy sorts and multiplies vectors of this size several times faster than torch's
CPU operators, and one implementation serves every device.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.errors import NodeFailed
from baton.types import SamplingParams
from node_engine.core.step import SampleSpec
from node_engine.model.philox import WORD, Words, philox4x32

Floats = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]

_PER_COUNTER = 4  # token ids that share a counter, one word each


def sample(
    logits: torch.Tensor,  # [rows, vocab], overwritten
    specs: Sequence[SampleSpec],  # one per row
) -> list[int]:
    """One token id per row. Raises NodeFailed when a row has no finite maximum: rather an error than a
    guess."""
    for row, spec in enumerate(specs):
        if spec.forbidden:
            logits[row, [token for token in spec.forbidden if token < logits.shape[1]]] = -math.inf
    best, argmax = logits.max(-1)
    if not bool(best.isfinite().all()):
        raise NodeFailed("logits are not finite: the model's weights or its KV cache are damaged")
    tokens: list[int] = argmax.tolist()
    drawn = [row for row, spec in enumerate(specs) if spec.params.temperature > 0]
    if drawn:
        rows = logits[drawn].to("cpu", torch.float32).numpy()
        for row, values in zip(drawn, rows, strict=True):
            tokens[row] = draw(values, specs[row])
    return tokens


def draw(logits: Floats, spec: SampleSpec) -> int:  # logits [vocab]
    """Sample softmax(logits / temperature), restricted by top-k and then top-p."""
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        scaled = (logits - logits.max()) / np.float32(spec.params.temperature)
    floor = _floor(scaled, spec.params)
    if floor is None:
        return int(np.argmax(scaled + gumbel_noise(len(scaled), spec)))
    kept = np.flatnonzero(scaled >= floor)
    return int(kept[np.argmax(scaled[kept] + gumbel_noise(len(scaled), spec, kept))])


def _floor(scaled: Floats, params: SamplingParams) -> np.float32 | None:
    """The lowest score that top-k and top-p leave, None for no bound. Scores equal to it are all kept, so
    that the order in which a sort leaves equals is of no account."""
    floor = None
    if 0 < params.top_k < len(scaled):
        floor = np.partition(scaled, -params.top_k)[-params.top_k]
        scaled = scaled[scaled >= floor]
    if params.top_p < 1.0:
        weights = np.exp(scaled)
        total = weights.sum(dtype=np.float64)
        # All that weigh less than this weigh less than 1 - top_p together: they need not be sorted.
        ranked = np.sort(scaled[weights >= (1.0 - params.top_p) * total / len(scaled)])[::-1]
        before = np.cumsum(np.exp(ranked), dtype=np.float64) - np.exp(ranked)
        floor = ranked[max(1, int(np.count_nonzero(before < params.top_p * total))) - 1]
    return floor


def gumbel_noise(
    vocab_size: int,
    spec: SampleSpec,
    tokens: TokenIds | None = None,  # [n], all of the vocabulary when None
) -> Floats:  # [n]
    """Independent standard Gumbel variables, each a function of seed, choice, position and its token id.

    Computed as -log(-log(1 - u)) from 32-bit uniforms u: large values, which win, come from small u, where a
    float is finest.
    """
    if tokens is not None and len(tokens) * _PER_COUNTER < vocab_size:
        words = np.stack(_words(tokens // _PER_COUNTER, spec))[tokens % _PER_COUNTER, np.arange(len(tokens))]
    else:
        counters = np.arange(-(-vocab_size // _PER_COUNTER))
        words = np.stack(_words(counters, spec), -1).reshape(-1)[:vocab_size]
        words = words if tokens is None else words[tokens]
    uniform = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    below_one = np.minimum(uniform, np.float32(1.0 - 2.0**-24))
    noise: Floats = -np.log(-np.log1p(-below_one))
    return noise


def _words(counters: TokenIds, spec: SampleSpec) -> tuple[Words, Words, Words, Words]:
    """Philox at (token id / 4, position, choice, 0) under the 64 bits of the seed."""
    zero = np.zeros(len(counters), dtype=np.uint64)
    position, choice = zero + np.uint64(spec.position & WORD), zero + np.uint64(spec.choice & WORD)
    key = (spec.params.seed & WORD, spec.params.seed >> 32 & WORD)
    return philox4x32((counters.astype(np.uint64), position, choice, zero), key)
