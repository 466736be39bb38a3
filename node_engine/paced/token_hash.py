"""The hash by which the paced engine draws tokens: of the context's digest, not of a model."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.types import TokenLogprobs

Longs = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
MASK = (1 << 64) - 1


def token_logprobs(digest: int, best: int, token: int, top: int, vocab_size: int) -> TokenLogprobs:
    """Made-up logprobs (see the module) that float32 represents exactly."""

    def logprob(rank: int) -> float:
        return -(rank + 1 + (digest & 15) / 16) / 8

    likely = (((best + rank) % vocab_size, logprob(rank)) for rank in range(min(top, vocab_size)))
    return TokenLogprobs(logprob((token - best) % vocab_size), tuple(likely))


def draw_token(
    digest: int,
    position: int,
    vocab_size: int,
    eos: Sequence[int],
    eos_probability: float,
    forbidden: Sequence[int],
) -> int:
    """The token at `position` after a context with `digest`; EOS only by its probability."""
    value = mix_int(digest ^ mix_int(position))
    allowed_eos = [token for token in eos if token not in forbidden]
    if allowed_eos and value / (MASK + 1) < eos_probability:
        return allowed_eos[0]
    excluded = {*eos, *forbidden}
    for _ in range(64):
        value = mix_int(value)
        if value % vocab_size not in excluded:
            return value % vocab_size
    return next((token for token in range(vocab_size) if token not in excluded), 0)


def mix(values: Longs) -> Longs:
    """Mix the bits of 64-bit values; a bijection.

    SplitMix64's step and finalizer (Steele, Lea, Flood 2014; constants of Stafford's variant 13).
    """
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: Longs = values ^ values >> np.uint64(31)
    return mixed


def mix_int(value: int) -> int:
    """Mix the bits of one 64-bit integer, as `mix` does for arrays."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def mix_tokens(tokens: Longs, positions: Ints) -> Longs:
    """What each token adds to the digest at its position."""
    return mix(tokens + (positions.astype(np.uint64) << np.uint64(32)))
