"""The `cost` eviction policy: evict the block with the least value.

The value of a block is the number of its tokens, times the cost to compute one of them, times the
rate at which it is expected to be used. All blocks of a pool have equally many tokens. Computing a
token of a prompt costs `1 + context / QUADRATIC_CONTEXT_TOKENS`, in units of a token without
context. The rate comes from kv_pool/core/eviction/reuse_model.py, by class: how often the block has
been used, and whether another block ever followed it in a prompt. Blocks of one class and similar
cost share a queue ordered by last use; the victim is the least valuable of the queues' fronts.
"""

import math
from array import array
from bisect import bisect
from dataclasses import dataclass

import numpy as np

from kv_pool.core.eviction.evictor import CandidateQueues
from kv_pool.core.eviction.ghost_table import GhostEntry, GhostTable
from kv_pool.core.eviction.reuse_model import ReuseModel

# Context at which a token costs twice as much as one without context. For an 8B model with
# grouped-query attention it is about a quarter of this; a value nearer to that prefers few long
# prompts to many short ones, at the expense of the hit ratio.
QUADRATIC_CONTEXT_TOKENS = 131072.0
_CLASS_BY_USES = (0, 1, 2, 3, 4, 4, 4, 4, 5)  # class by number of uses; more uses: the last class
_UNUSED_TAIL_CLASS = max(_CLASS_BY_USES) + 1  # not used yet, and the last block of its prompt
_NUM_CLASSES = _UNUSED_TAIL_CLASS + 1
_CLASS_BY_USES_ARRAY = np.array(_CLASS_BY_USES)
_MAX_USES = 0xFFFF
_DEPTH_LIMITS = (4096, 16384, 65536)  # tokens before a block: bounds between queues of a class
_TYPICAL_DEPTHS = (2048, 8192, 32768, 98304)  # tokens before a typical block of each queue
# Values are computed anew after this many insertions, or a sixteenth of the tier if that is more.
_MIN_RELEARN_INSERTIONS = 256
# Learned values are not exact: of blocks whose values differ by a smaller factor, the least
# recently used is evicted.
_VALUE_MARGIN = 1.5
_MAX_RUN = 16  # victims taken from one queue before all queues are compared again


@dataclass(slots=True)
class _VictimRun:
    """A run of victims from one queue, without comparing it with the other queues."""

    queue: int
    age_bucket: int  # the run ends when the front of the queue is in another bucket of age
    latest_use: float  # seconds; the run ends when the front was used after this time
    victims_left: int


class CostEvictor:
    """Evicts the block of a tier that is least worth keeping."""

    def __init__(
        self, num_blocks: int, block_size: int, quadratic: float = QUADRATIC_CONTEXT_TOKENS
    ) -> None:
        self._reuse_model = ReuseModel(_NUM_CLASSES)
        self._ghosts = GhostTable(num_blocks)
        self._candidates = CandidateQueues(num_blocks, _NUM_CLASSES * len(_TYPICAL_DEPTHS))
        self._last_use = array("d", bytes(8 * num_blocks))
        self._uses = array("H", bytes(2 * num_blocks))
        self._reuse_class = array("b", bytes(num_blocks))
        self._queue = array("b", bytes(num_blocks))
        # The same memory as arrays, to update many blocks at once.
        self._last_uses = np.frombuffer(self._last_use)
        self._all_uses = np.frombuffer(self._uses, dtype=np.uint16)
        self._reuse_classes, self._queues = (
            np.frombuffer(values, dtype=np.int8) for values in (self._reuse_class, self._queue)
        )
        self._depth_thresholds = [tokens // block_size for tokens in _DEPTH_LIMITS]
        self._cost_by_depth = 1 + np.array(_TYPICAL_DEPTHS) / quadratic
        self._relearn_after = max(_MIN_RELEARN_INSERTIONS, num_blocks // 16)
        self._num_inserted = 0
        self._run = _VictimRun(0, 0, 0.0, 0)
        self._value_by_queue = self._compute_values()

    def on_block_inserted(self, block: int, key: int, depth: int, now: float) -> None:
        ghost = self._ghosts.pop_ghost(key)
        if ghost is not None:
            self._reuse_model.record_reuse(ghost.reuse_class, now - ghost.last_use)
        uses = ghost.use_count + 1 if ghost else 0
        self._uses[block], self._last_use[block] = min(uses, _MAX_USES), now
        self._reuse_class[block] = (
            _CLASS_BY_USES[min(uses, len(_CLASS_BY_USES) - 1)] if uses else _UNUSED_TAIL_CLASS
        )
        self._queue[block] = self._reuse_class[block] * len(_TYPICAL_DEPTHS) + bisect(
            self._depth_thresholds, depth
        )
        self._reuse_model.record_entries(self._reuse_class[block])
        self._num_inserted += 1
        if self._num_inserted % self._relearn_after == 0:
            self._reuse_model.decay_counts()
            self._value_by_queue = self._compute_values()

    def on_child_added(self, block: int) -> None:
        if self._reuse_class[block] == _UNUSED_TAIL_CLASS:
            self._reuse_model.remove_entry(_UNUSED_TAIL_CLASS)
            self._reuse_model.record_entries(0)
            self._reuse_class[block], self._queue[block] = (
                0,
                self._queue[block] % len(_TYPICAL_DEPTHS),
            )

    def on_path_used(self, path: "array[int]", now: float) -> None:
        blocks = np.frombuffer(path, dtype=np.int32)
        before = self._reuse_classes[blocks].astype(np.intp)
        self._reuse_model.record_prompt_reuse(before, now - self._last_uses[blocks])
        uses = np.minimum(self._all_uses[blocks], _MAX_USES - 1) + 1
        after = _CLASS_BY_USES_ARRAY[np.minimum(uses, len(_CLASS_BY_USES) - 1)]
        self._last_uses[blocks], self._all_uses[blocks], self._reuse_classes[blocks] = (
            now,
            uses,
            after,
        )
        self._queues[blocks] += (after - before).astype(np.int8) * len(_TYPICAL_DEPTHS)
        for reuse_class, count in enumerate(np.bincount(after, minlength=_NUM_CLASSES).tolist()):
            self._reuse_model.record_entries(reuse_class, count)

    def add_candidate(self, block: int) -> None:
        self._candidates.add_block(block, self._queue[block], self._last_use[block])

    def remove_candidate(self, block: int) -> None:
        self._candidates.remove_block(block)

    def choose_victim(self, now: float) -> int | None:
        block = self._next_victim_of_run(now)
        if block < 0:
            block = self._choose_least_valuable(now)
        if block < 0:
            return None
        self._candidates.remove_block(block)
        return block

    def on_block_removed(self, block: int, key: int) -> None:
        self._ghosts.add_ghost(
            key, GhostEntry(self._reuse_class[block], self._uses[block], self._last_use[block])
        )

    def _next_victim_of_run(self, now: float) -> int:
        """Return the next victim of the present run, or -1 if the run has ended."""
        run = self._run
        if not run.victims_left:
            return -1
        block = self._candidates.find_oldest(run.queue, self._queue, self._last_use)
        if block < 0:
            return -1
        last_use = self._last_use[block]
        if (
            last_use > run.latest_use
            or self._reuse_model.age_bucket(now - last_use) != run.age_bucket
        ):
            return -1
        run.victims_left -= 1
        return block

    def _choose_least_valuable(self, now: float) -> int:
        """Compare the fronts of all queues and start a run; -1 if there is no candidate."""
        fronts: list[tuple[float, float, int]] = []  # value, last use, block
        for queue, values in enumerate(self._value_by_queue):
            block = self._candidates.find_oldest(queue, self._queue, self._last_use)
            if block >= 0:
                last_use = self._last_use[block]
                value = values[self._reuse_model.age_bucket(now - last_use)]
                fronts.append((value, last_use, block))
        if not fronts:
            return -1
        by_age = sorted(fronts, key=lambda front: front[1:])
        least, oldest, next_oldest = min(fronts), by_age[0], by_age[min(1, len(fronts) - 1)]
        is_clear = least[0] * _VALUE_MARGIN < oldest[0]
        _, last_use, block = least if is_clear else oldest
        latest = math.inf if is_clear or len(fronts) == 1 else next_oldest[1]
        self._run = _VictimRun(
            self._queue[block], self._reuse_model.age_bucket(now - last_use), latest, _MAX_RUN
        )
        return block

    def _compute_values(self) -> list[list[float]]:
        """Return the value of a block by queue and bucket of age."""
        rates = self._reuse_model.compute_reuse_rates()
        values = rates[:, None, :] * self._cost_by_depth[None, :, None]
        by_queue: list[list[float]] = values.reshape(-1, rates.shape[1]).tolist()
        return by_queue
