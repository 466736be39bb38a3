"""What a paced engine must generate, computed from the tokens alone, without any KV.

Tests compare the tokens of nodes and clusters with these: KV that was lost, mixed up or changed on
its way gives other tokens.
"""

from collections.abc import Sequence

import numpy as np

from baton.types import TokenLogprobs
from node_engine.paced.token_hash import MASK, draw_token, mix_int, mix_tokens, token_logprobs


def paced_reference_tokens(
    prompt: Sequence[int],
    n: int,
    vocab_size: int = 32000,
    *,
    eos_token_ids: tuple[int, ...] = (0,),
    eos_probability: float = 0.0,
) -> list[int]:
    """The first `n` tokens that a PacedEngine generates after `prompt`, computed without KV.

    Does not stop at EOS.
    """
    tokens = list(prompt)
    digest = int(
        mix_tokens(np.array(tokens, np.uint64), np.arange(len(tokens))).sum(dtype=np.uint64)
    )
    for position in range(len(prompt), len(prompt) + n):
        token = draw_token(digest, position, vocab_size, eos_token_ids, eos_probability, ())
        digest = (digest + mix_int(token + (position << 32))) & MASK
        tokens.append(token)
    return tokens[len(prompt) :]


def paced_reference_logprobs(
    tokens: Sequence[int],
    top: int,
    vocab_size: int = 32000,
    *,
    eos_token_ids: tuple[int, ...] = (0,),
    eos_probability: float = 0.0,
) -> list[TokenLogprobs]:
    """The logprobs that a PacedEngine gives `tokens[1:]`, prompt or output."""
    digest, found = 0, []
    for position in range(1, len(tokens)):
        digest = (digest + mix_int(tokens[position - 1] + (position - 1 << 32))) & MASK
        best = draw_token(digest, position, vocab_size, eos_token_ids, eos_probability, ())
        found.append(token_logprobs(digest, best, tokens[position], top, vocab_size))
    return found
