"""The `cost` policy: what is least worth keeping goes first. A block is worth the tokens that it saves, times what it
takes to compute one of them, times how likely it is to be wanted again.

Tokens are the same for all blocks of a pool. Computing a token of a prompt costs `1 + context / QUADRATIC`, in units of
a token without context. Likelihood comes from kv_pool/core/reuse.py by class: how often the block has been used, and
whether anything ever followed it in a prompt. Blocks of one class and about one cost stand in one queue by last use;
the victim is the least valuable of the queues' ends.
"""

import math
from array import array
from bisect import bisect
from dataclasses import dataclass

import numpy as np

from kv_pool.core.eviction import Offers
from kv_pool.core.ghosts import Ghost, Ghosts
from kv_pool.core.reuse import ReuseModel

# Context at which a token costs twice as much. An 8B model with grouped heads has about a quarter of it; the nearer to
# that, the more a few long prompts are preferred to many short ones, at the expense of the ratio of hits.
QUADRATIC = 131072.0  # tokens
_USES = (0, 1, 2, 3, 4, 4, 4, 4, 5)  # uses -> class; as the last from there on
_TIP = max(_USES) + 1  # not used yet, and the last of its prompt
_CLASSES = _TIP + 1
_CLASS_OF = np.array(_USES)
_MOST_USES = 0xFFFF
_DEPTHS = (4096, 16384, 65536)  # tokens: where another queue begins
_MIDDLES = (2048, 8192, 32768, 98304)  # tokens before a typical block of each
_RELEARN = 256  # inserted blocks, or a sixteenth of the tier, between two looks at what was learned
_MARGIN = 1.5  # what is learned is not exact: of blocks that differ by less, the least recently used goes
_RUN = 16  # victims of one queue between two looks at all queues


@dataclass(slots=True)
class _Run:
    """The next `left` victims come from `queue`, while its end is in `bucket` of age and was last used by `latest`."""

    queue: int
    bucket: int
    latest: float
    left: int


class CostEviction:
    """Of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, quadratic: float = QUADRATIC) -> None:
        self._model = ReuseModel(_CLASSES)
        self._ghosts = Ghosts(num_blocks)
        self._offers = Offers(num_blocks, _CLASSES * len(_MIDDLES))
        self._last_use = array("d", bytes(8 * num_blocks))
        self._uses = array("H", bytes(2 * num_blocks))
        self._kind = array("b", bytes(num_blocks))
        self._queue = array("b", bytes(num_blocks))
        # The same memory, for many blocks at once.
        self._last_uses = np.frombuffer(self._last_use)
        self._all_uses = np.frombuffer(self._uses, dtype=np.uint16)
        self._kinds, self._queues = (np.frombuffer(one, dtype=np.int8) for one in (self._kind, self._queue))
        self._thresholds = [tokens // block_size for tokens in _DEPTHS]
        self._costs = 1 + np.array(_MIDDLES) / quadratic
        self._relearn_after = max(_RELEARN, num_blocks // 16)
        self._inserted = 0
        self._run = _Run(0, 0, 0.0, 0)
        self._worth = self._learn()

    def inserted(self, block: int, key: int, depth: int, now: float) -> None:
        ghost = self._ghosts.recall(key)
        if ghost is not None:
            self._model.reused(ghost.kind, now - ghost.last_use)
        uses = ghost.uses + 1 if ghost else 0
        self._uses[block], self._last_use[block] = min(uses, _MOST_USES), now
        self._kind[block] = _USES[min(uses, len(_USES) - 1)] if uses else _TIP
        self._queue[block] = self._kind[block] * len(_MIDDLES) + bisect(self._thresholds, depth)
        self._model.entered(self._kind[block])
        self._inserted += 1
        if self._inserted % self._relearn_after == 0:
            self._model.forget()
            self._worth = self._learn()

    def followed(self, block: int) -> None:
        if self._kind[block] == _TIP:
            self._model.left(_TIP)
            self._model.entered(0)
            self._kind[block], self._queue[block] = 0, self._queue[block] % len(_MIDDLES)

    def used(self, path: "array[int]", now: float) -> None:
        blocks = np.frombuffer(path, dtype=np.int32)
        kinds = self._kinds[blocks].astype(np.intp)
        self._model.reused_all(kinds, now - self._last_uses[blocks])
        uses = np.minimum(self._all_uses[blocks], _MOST_USES - 1) + 1
        after = _CLASS_OF[np.minimum(uses, len(_USES) - 1)]
        self._last_uses[blocks], self._all_uses[blocks], self._kinds[blocks] = now, uses, after
        self._queues[blocks] += (after - kinds).astype(np.int8) * len(_MIDDLES)
        for kind, count in enumerate(np.bincount(after, minlength=_CLASSES).tolist()):
            self._model.entered(kind, count)

    def offer(self, block: int) -> None:
        self._offers.add(block, self._queue[block], self._last_use[block])

    def withdraw(self, block: int) -> None:
        self._offers.withdraw(block)

    def choose(self, now: float) -> int | None:
        block = self._next_of_run(now)
        if block < 0:
            block = self._least_worth(now)
        if block < 0:
            return None
        self._offers.withdraw(block)
        return block

    def removed(self, block: int, key: int) -> None:
        self._ghosts.remember(key, Ghost(self._kind[block], self._uses[block], self._last_use[block]))

    def _next_of_run(self, now: float) -> int:
        """What was chosen last time goes on being the choice while its end is about as old and its reason holds."""
        run = self._run
        if not run.left:
            return -1
        block = self._offers.oldest(run.queue, self._queue, self._last_use)
        if block < 0:
            return -1
        last_use = self._last_use[block]
        if last_use > run.latest or self._model.bucket(now - last_use) != run.bucket:
            return -1
        run.left -= 1
        return block

    def _least_worth(self, now: float) -> int:
        ends: list[tuple[float, float, int]] = []  # of the queues: worth, last use, block
        for queue, worths in enumerate(self._worth):
            block = self._offers.oldest(queue, self._queue, self._last_use)
            if block >= 0:
                last_use = self._last_use[block]
                ends.append((worths[self._model.bucket(now - last_use)], last_use, block))
        if not ends:
            return -1
        by_age = sorted(ends, key=lambda end: end[1:])
        least, oldest, next_oldest = min(ends), by_age[0], by_age[min(1, len(ends) - 1)]
        clear = least[0] * _MARGIN < oldest[0]
        _, last_use, block = least if clear else oldest
        latest = math.inf if clear or len(ends) == 1 else next_oldest[1]
        self._run = _Run(self._queue[block], self._model.bucket(now - last_use), latest, _RUN)
        return block

    def _learn(self) -> list[list[float]]:
        """Worth by queue and age."""
        likelihood = self._model.index()
        worth = likelihood[:, None, :] * self._costs[None, :, None]
        by_queue: list[list[float]] = worth.reshape(-1, likelihood.shape[1]).tolist()
        return by_queue
