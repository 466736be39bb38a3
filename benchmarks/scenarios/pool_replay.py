"""Replay a trace through the pool's index and eviction policies, and through the optimum.

Each request matches its prompt and publishes the missing blocks; the publisher pins the path.
Blocks are those of the trace, of 512 tokens. The last block of a prompt is mostly not full and
counts as a block all the same.

Belady's optimum (1966) knows the future: it evicts the block whose next use is farthest away. That
block is always a leaf, since a request that uses a block uses those before it. The optimum may also
evict what has just been published. So its hits are an upper bound for every policy, whether or not
it evicts leaves first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import takewhile

from baton.kv.blocks import BlockHash
from benchmarks.load.traces import MOONCAKE_BLOCK, TraceRequest
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.eviction.cost_evictor import QUADRATIC_CONTEXT_TOKENS, CostEvictor
from kv_pool.core.eviction.evictor import Evictor, LruEvictor
from kv_pool.core.index.radix_index import ROOT, PromptChain

POLICIES = ("lru", "cost")
_ROOT = BlockHash(bytes(32))
_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class HitRatios:
    """The hits of one policy."""

    block_hit_ratio: float
    saved_cost_share: float  # of the cost of computing all prompts, which grows with context


class TracePrompts:
    """The prompts of a trace, with one token for each block."""

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        self.arrival_times = [request.arrival_seconds for request in trace]
        self.prompts = [PromptChain.from_tokens(_ROOT, request.block_ids, 1) for request in trace]
        self.block_count = sum(map(len, self.prompts))
        self.distinct_block_count = len(
            {prompt.block_hash(number) for prompt in self.prompts for number in range(len(prompt))}
        )
        self.total_cost = sum(prefill_cost(len(prompt)) for prompt in self.prompts)

    def compute_hit_ratios(self, found: Sequence[int]) -> HitRatios:
        """Return the ratios; `found` has the number of cached leading blocks of each prompt."""
        return HitRatios(
            sum(found) / self.block_count, sum(map(prefill_cost, found)) / self.total_cost
        )


def prefill_cost(blocks: int) -> float:
    """Return the cost of computing the first blocks of a prompt, in tokens without context."""
    tokens = blocks * MOONCAKE_BLOCK
    return tokens * (1 + tokens / 2 / QUADRATIC_CONTEXT_TOKENS)


def make_evictor(policy: str, capacity: int) -> Evictor:
    return LruEvictor(capacity) if policy == "lru" else CostEvictor(capacity, MOONCAKE_BLOCK)


def replay_policy(prompts: TracePrompts, capacity: int, policy: str) -> HitRatios:
    capacity = min(capacity, prompts.distinct_block_count)
    tier = CacheTier(capacity, 1, make_evictor(policy, capacity))
    return prompts.compute_hit_ratios(
        [
            _serve_prompt(tier, *arguments)
            for arguments in zip(prompts.prompts, prompts.arrival_times, strict=True)
        ]
    )


def _serve_prompt(tier: CacheTier, prompt: PromptChain, now: float) -> int:
    """Return the cached blocks of a prompt, and publish the missing ones while there is room."""
    path = tier.match_prefix(prompt, now)
    parent = path[-1] if path else ROOT
    if parent != ROOT:
        tier.pin(parent)
    for number in range(len(path), len(prompt)):
        new_block = tier.allocate_blocks(1, now)
        if not new_block:
            break
        if not tier.insert_block(new_block[0], prompt, number, parent, now):
            tier.free_block(new_block[0])
            break
        tier.pin(new_block[0])
        if parent != ROOT:
            tier.unpin(parent)
        parent = new_block[0]
    if parent != ROOT:
        tier.unpin(parent)
    return len(path)


def replay_belady(prompts: TracePrompts, capacity: int) -> HitRatios:
    following = _next_uses(prompts.prompts)
    next_use: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []  # -(next use), -depth, key; some are stale
    hits: list[int] = []
    for prompt, uses in zip(prompts.prompts, following, strict=True):
        keys = [prompt.index_key(number) for number in range(len(prompt))]
        hits.append(len(list(takewhile(next_use.__contains__, keys))))
        for depth, (key, use) in enumerate(zip(keys, uses, strict=True)):
            next_use[key] = use
            heappush(farthest, (-use, -depth, key))
        while len(next_use) > capacity:
            use, _, key = heappop(farthest)
            if next_use.get(key) == -use:
                del next_use[key]
    return prompts.compute_hit_ratios(hits)


def _next_uses(prompts: Sequence[PromptChain]) -> list[list[int]]:
    """Return, for each block of each prompt, the number of the next prompt that has it."""
    following: list[list[int]] = []
    next_use: dict[int, int] = {}
    for number in range(len(prompts) - 1, -1, -1):
        keys = [prompts[number].index_key(place) for place in range(len(prompts[number]))]
        following.append([next_use.get(key, _NEVER) for key in keys])
        next_use.update(dict.fromkeys(keys, number))
    return following[::-1]


def compute_partial_gain(trace: Sequence[TraceRequest], block: int) -> tuple[float, float]:
    """Return the most that sharing partly matching blocks can save, as shares of all prompt tokens.

    The first share is for whole blocks of `block` tokens, the second for copy on write beyond them.
    The trace says whether blocks of 512 tokens are equal and not where they begin to differ. A
    prompt that leaves the path of an earlier one in the middle of the block in which that one ended
    is assumed to continue from there. The first block does not count, because nearly all prompts
    share it.
    """
    # (blocks before, the last of them) -> tokens in the last block of a prompt
    ends: dict[tuple[int, int], int] = {}
    known_ids: set[int] = set()
    in_blocks = beyond = 0
    for request in trace:
        known_blocks = len(list(takewhile(known_ids.__contains__, request.block_ids)))
        if 2 <= known_blocks < len(request.block_ids):
            shared = min(
                ends.get((known_blocks, request.block_ids[known_blocks - 1]), 0),
                request.prompt_tokens - known_blocks * MOONCAKE_BLOCK,
            )
            in_blocks += shared // block * block
            beyond += shared % block
        known_ids.update(request.block_ids)
        tail = request.prompt_tokens % MOONCAKE_BLOCK
        if tail and len(request.block_ids) > 1:
            ends[len(request.block_ids) - 1, request.block_ids[-2]] = tail
    tokens = sum(request.prompt_tokens for request in trace)
    return in_blocks / tokens, beyond / tokens
