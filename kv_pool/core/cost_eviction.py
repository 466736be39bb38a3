"""The `cost` policy: what is least worth keeping goes first. A block is worth the tokens that it saves, times what it
takes to compute one of them, times how likely it is to be wanted again.

Tokens are the same for all blocks of a pool. Computing a token of a prompt costs `1 + context / QUADRATIC`, in units of
a token without context. Likelihood comes from kv_pool/core/reuse.py by class: how often the block has been used, and
whether anything ever followed it in a prompt. Blocks of one class and about one cost stand in one queue by last use;
the victim is the least valuable of the queues' ends.
"""

from array import array
from bisect import bisect

import numpy as np

from kv_pool.core.eviction import Offers
from kv_pool.core.ghosts import Ghost, Ghosts
from kv_pool.core.reuse import ReuseModel

# Context at which attention has made a token twice as dear, about that of an 8B model with grouped heads.
QUADRATIC = 32768.0  # tokens
_USES = (0, 1, 2, 3, 4, 4, 4, 4, 5)  # uses -> class; as the last from there on
_TIP = max(_USES) + 1  # not used yet, and the last of its prompt
_CLASSES = _TIP + 1
_CLASS_OF = np.array(_USES)
_MOST_USES = 0xFFFF
_DEPTHS = (4096, 16384, 65536)  # tokens: where another queue begins
_MIDDLES = (2048, 8192, 32768, 98304)  # tokens before a typical block of each
_RELEARN = 256  # inserted blocks, or a sixteenth of the tier, between two looks at what was learned
_RUN = 16  # victims of one queue between two looks at all queues


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
        self._run = (0, 0, 0)  # queue and bucket of the last victim, and how many more go without another look
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
        """The queue that had the least worth still has it while the age of its end is about the same."""
        queue, bucket, left = self._run
        if not left:
            return -1
        block = self._offers.oldest(queue, self._queue, self._last_use)
        if block < 0 or self._model.bucket(now - self._last_use[block]) != bucket:
            return -1
        self._run = (queue, bucket, left - 1)
        return block

    def _least_worth(self, now: float) -> int:
        best: tuple[float, float, int] | None = None
        for queue, worth in enumerate(self._worth):
            block = self._offers.oldest(queue, self._queue, self._last_use)
            if block >= 0:
                last_use = self._last_use[block]
                found = (worth[self._model.bucket(now - last_use)], last_use, block)
                best = found if best is None else min(best, found)
        if best is None:
            return -1
        self._run = (self._queue[best[2]], self._model.bucket(now - best[1]), _RUN)
        return best[2]

    def _learn(self) -> list[list[float]]:
        """Worth by queue and age."""
        likelihood = self._model.index()
        worth = likelihood[:, None, :] * self._costs[None, :, None]
        by_queue: list[list[float]] = worth.reshape(-1, likelihood.shape[1]).tolist()
        return by_queue
