"""Prompts for the pool's tests: 4 tokens a block."""

from collections.abc import Sequence

from baton.block_hash import BlockHash
from kv_pool.core.chain import Chain
from kv_pool.core.radix_index import ROOT
from kv_pool.core.tier import Tier

SIZE = 4
ROOTS = tuple(BlockHash(bytes([number]) * 32) for number in range(3))


def chain(tokens: Sequence[int], root: BlockHash = ROOTS[0]) -> Chain:
    return Chain.of(root, tokens, SIZE)


def of_blocks(*ids: int, root: BlockHash = ROOTS[0], rest: Sequence[int] = ()) -> Chain:
    """A block of four equal tokens for each id, then `rest`."""
    return chain([token for one in ids for token in (one,) * SIZE] + list(rest), root)


def fill(tier: Tier, prompt: Chain, now: float = 0.0) -> list[int]:
    """Publish what is missing of `prompt`, as far as there is room. Returns its blocks."""
    path = list(tier.index.match(prompt))
    for number in range(len(path), len(prompt)):
        parent = path[-1] if path else ROOT
        if parent != ROOT:
            tier.pin(parent)
        taken = tier.take(1, now)
        inserted = bool(taken) and tier.insert(taken[0], prompt, number, parent, now)
        if parent != ROOT:
            tier.unpin(parent)
        if not inserted:
            break
        path.append(taken[0])
    return path
