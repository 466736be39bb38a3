"""Prompts for the pool's tests: 4 tokens a block."""

from collections.abc import Sequence

from baton.kv.blocks import BlockHash
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.index.radix_index import ROOT, PromptChain

PROMPT_BLOCK_TOKENS = 4
ROOTS = tuple(BlockHash(bytes([number]) * 32) for number in range(3))


def make_chain(tokens: Sequence[int], root: BlockHash = ROOTS[0]) -> PromptChain:
    return PromptChain.from_tokens(root, tokens, PROMPT_BLOCK_TOKENS)


def make_block_chain(
    *ids: int, root: BlockHash = ROOTS[0], rest: Sequence[int] = ()
) -> PromptChain:
    """A block of four equal tokens for each id, then `rest`."""
    return make_chain(
        [token for token_id in ids for token in (token_id,) * PROMPT_BLOCK_TOKENS] + list(rest),
        root,
    )


def insert_chain(tier: CacheTier, prompt: PromptChain, now: float = 0.0) -> list[int]:
    """Publish what is missing of `prompt`, as far as there is room. Returns its blocks."""
    path = list(tier.index.match_prefix(prompt))
    for number in range(len(path), len(prompt)):
        parent = path[-1] if path else ROOT
        if parent != ROOT:
            tier.pin(parent)
        taken = tier.allocate_blocks(1, now)
        inserted = bool(taken) and tier.insert_block(taken[0], prompt, number, parent, now)
        if parent != ROOT:
            tier.unpin(parent)
        if not inserted:
            break
        path.append(taken[0])
    return path
