"""A trace through the pool's own index and eviction policies, and through what no policy can beat.

Each request matches its prompt and publishes the blocks that are missing; who publishes holds on to the path. Blocks
are the trace's, of 512 tokens; the last one of a prompt is mostly not full and counts as a block all the same.

Belady's optimum (1966) knows the future: of all blocks it evicts the one whose next use is farthest away, which is
always a leaf, since whoever uses a block uses those before it. It may also evict what has just been published. So its
hits are an upper bound for every policy, leaves first or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import takewhile

from baton.block_hash import BlockHash
from benchmarks.traces import MOONCAKE_BLOCK, Recorded
from kv_pool.core.chain import Chain
from kv_pool.core.cost_eviction import QUADRATIC, CostEviction
from kv_pool.core.eviction import Evictor, Lru
from kv_pool.core.radix_index import ROOT
from kv_pool.core.tier import Tier

POLICIES = ("lru", "cost")
_ROOT = BlockHash(bytes(32))
_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Hits:
    """`ratio` of the blocks of all prompts; `saved` of what computing all of them would have cost, in which a token
    costs more the more stands before it."""

    ratio: float
    saved: float


class Workload:
    """The prompts of a trace, one token for a block."""

    def __init__(self, trace: Sequence[Recorded]) -> None:
        self.moments = [one.at for one in trace]
        self.prompts = [Chain.of(_ROOT, one.blocks, 1) for one in trace]
        self.blocks = sum(map(len, self.prompts))
        self.different = len({prompt.name(number) for prompt in self.prompts for number in range(len(prompt))})
        self.cost = sum(cost_of(len(prompt)) for prompt in self.prompts)

    def hits(self, found: Sequence[int]) -> Hits:
        """`found`: of each prompt, the leading blocks that were there."""
        return Hits(sum(found) / self.blocks, sum(map(cost_of, found)) / self.cost)


def cost_of(blocks: int) -> float:
    """Of computing so many blocks of a prompt from its beginning, in tokens without context."""
    tokens = blocks * MOONCAKE_BLOCK
    return tokens * (1 + tokens / 2 / QUADRATIC)


def evictor(policy: str, capacity: int) -> Evictor:
    return Lru(capacity) if policy == "lru" else CostEviction(capacity, MOONCAKE_BLOCK)


def replay(work: Workload, capacity: int, policy: str) -> Hits:
    capacity = min(capacity, work.different)
    tier = Tier(capacity, 1, evictor(policy, capacity))
    return work.hits([_serve(tier, *one) for one in zip(work.prompts, work.moments, strict=True)])


def _serve(tier: Tier, prompt: Chain, now: float) -> int:
    """Blocks that were there. The missing ones are there afterwards, as far as there is room."""
    path = tier.match(prompt, now)
    parent = path[-1] if path else ROOT
    if parent != ROOT:
        tier.pin(parent)
    for number in range(len(path), len(prompt)):
        taken = tier.take(1, now)
        if not taken:
            break
        if not tier.insert(taken[0], prompt, number, parent, now):
            tier.give_back(taken[0])
            break
        tier.pin(taken[0])
        if parent != ROOT:
            tier.unpin(parent)
        parent = taken[0]
    if parent != ROOT:
        tier.unpin(parent)
    return len(path)


def belady(work: Workload, capacity: int) -> Hits:
    following = _next_uses(work.prompts)
    next_use: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []  # -(next use), -depth, key; some are out of date
    found: list[int] = []
    for prompt, uses in zip(work.prompts, following, strict=True):
        keys = [prompt.key(number) for number in range(len(prompt))]
        found.append(len(list(takewhile(next_use.__contains__, keys))))
        for depth, (key, use) in enumerate(zip(keys, uses, strict=True)):
            next_use[key] = use
            heappush(farthest, (-use, -depth, key))
        while len(next_use) > capacity:
            use, _, key = heappop(farthest)
            if next_use.get(key) == -use:
                del next_use[key]
    return work.hits(found)


def _next_uses(prompts: Sequence[Chain]) -> list[list[int]]:
    """Of each block of each prompt, the number of the next prompt that has it."""
    following: list[list[int]] = []
    seen: dict[int, int] = {}
    for number in range(len(prompts) - 1, -1, -1):
        keys = [prompts[number].key(place) for place in range(len(prompts[number]))]
        following.append([seen.get(key, _NEVER) for key in keys])
        seen.update(dict.fromkeys(keys, number))
    return following[::-1]


def partial_gain(trace: Sequence[Recorded], block: int) -> tuple[float, float]:
    """What sharing partly matching blocks can save at most, as shares of all prompt tokens: (in whole blocks of `block`
    tokens, with copy on write beyond them).

    The trace tells whether blocks of 512 tokens are equal and not where they begin to differ. A prompt that leaves the
    path of an earlier one where that ended, in the middle of a block, is taken to go on from there. The first block
    does not count: nearly all prompts have the same.
    """
    ends: dict[tuple[int, int], int] = {}  # (blocks before, the last of them) -> tokens in the block that ends a prompt
    seen: set[int] = set()
    whole = beyond = 0
    for one in trace:
        known = len(list(takewhile(seen.__contains__, one.blocks)))
        if 2 <= known < len(one.blocks):
            shared = min(ends.get((known, one.blocks[known - 1]), 0), one.prompt_tokens - known * MOONCAKE_BLOCK)
            whole += shared // block * block
            beyond += shared % block
        seen.update(one.blocks)
        tail = one.prompt_tokens % MOONCAKE_BLOCK
        if tail and len(one.blocks) > 1:
            ends[len(one.blocks) - 1, one.blocks[-2]] = tail
    tokens = sum(one.prompt_tokens for one in trace)
    return whole / tokens, beyond / tokens
