"""The `cost` policy: what is least worth keeping goes first. A block is worth the tokens that it
saves, times what it takes to compute one of them, times how likely it is to be wanted again.

Tokens are the same for all blocks of a pool. Computing a token of a prompt costs `1 + context /
QUADRATIC`, in units of a token without context. Likelihood comes from
kv_pool/core/eviction/reuse_model.py by class: how often the block has been used, and whether
anything ever followed it in a prompt. Blocks of one class and about one cost stand in one queue by
last use; the victim is the least valuable of the queues' ends.
"""

import math
from array import array
from bisect import bisect
from dataclasses import dataclass

import numpy as np

from kv_pool.core.eviction.evictor import CandidateQueues
from kv_pool.core.eviction.ghost_table import GhostEntry, GhostTable
from kv_pool.core.eviction.reuse_model import ReuseModel

# Context at which a token costs twice as much. An 8B model with grouped heads has about a quarter
# of it; the nearer to that, the more a few long prompts are preferred to many short ones, at the
# expense of the ratio of hits.
QUADRATIC_CONTEXT_TOKENS = 131072.0  # tokens
_CLASS_BY_USES = (0, 1, 2, 3, 4, 4, 4, 4, 5)  # uses -> class; as the last from there on
_UNUSED_TAIL_CLASS = max(_CLASS_BY_USES) + 1  # not used yet, and the last of its prompt
_NUM_CLASSES = _UNUSED_TAIL_CLASS + 1
_CLASS_BY_USES_ARRAY = np.array(_CLASS_BY_USES)
_MAX_USES = 0xFFFF
_DEPTH_LIMITS = (4096, 16384, 65536)  # tokens: where another queue begins
_TYPICAL_DEPTHS = (2048, 8192, 32768, 98304)  # tokens before a typical block of each
_MIN_RELEARN_INSERTIONS = (
    256  # inserted blocks, or a sixteenth of the tier, between two looks at what was learned
)
_VALUE_MARGIN = (
    1.5  # what is learned is not exact: of blocks that differ by less, the least recently used goes
)
_MAX_RUN = 16  # victims of one queue between two looks at all queues


@dataclass(slots=True)
class _VictimRun:
    """The next `victims_left` victims come from `queue`, while its end is in `age_bucket` of age
    and was last used by `latest_use`."""

    queue: int
    age_bucket: int
    latest_use: float
    victims_left: int


class CostEvictor:
    """Of `num_blocks` blocks of `block_size` tokens."""

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
        # The same memory, for many blocks at once.
        self._last_uses = np.frombuffer(self._last_use)
        self._all_uses = np.frombuffer(self._uses, dtype=np.uint16)
        self._reuse_classes, self._queues = (
            np.frombuffer(one, dtype=np.int8) for one in (self._reuse_class, self._queue)
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
        kinds = self._reuse_classes[blocks].astype(np.intp)
        self._reuse_model.record_prompt_reuse(kinds, now - self._last_uses[blocks])
        uses = np.minimum(self._all_uses[blocks], _MAX_USES - 1) + 1
        after = _CLASS_BY_USES_ARRAY[np.minimum(uses, len(_CLASS_BY_USES) - 1)]
        self._last_uses[blocks], self._all_uses[blocks], self._reuse_classes[blocks] = (
            now,
            uses,
            after,
        )
        self._queues[blocks] += (after - kinds).astype(np.int8) * len(_TYPICAL_DEPTHS)
        for kind, count in enumerate(np.bincount(after, minlength=_NUM_CLASSES).tolist()):
            self._reuse_model.record_entries(kind, count)

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
        """What was chosen last time goes on being the choice while its end is about as old and its
        reason holds."""
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
        ends: list[tuple[float, float, int]] = []  # of the queues: worth, last use, block
        for queue, worths in enumerate(self._value_by_queue):
            block = self._candidates.find_oldest(queue, self._queue, self._last_use)
            if block >= 0:
                last_use = self._last_use[block]
                ends.append((worths[self._reuse_model.age_bucket(now - last_use)], last_use, block))
        if not ends:
            return -1
        by_age = sorted(ends, key=lambda end: end[1:])
        least, oldest, next_oldest = min(ends), by_age[0], by_age[min(1, len(ends) - 1)]
        clear = least[0] * _VALUE_MARGIN < oldest[0]
        _, last_use, block = least if clear else oldest
        latest = math.inf if clear or len(ends) == 1 else next_oldest[1]
        self._run = _VictimRun(
            self._queue[block], self._reuse_model.age_bucket(now - last_use), latest, _MAX_RUN
        )
        return block

    def _compute_values(self) -> list[list[float]]:
        """Worth by queue and age."""
        likelihood = self._reuse_model.compute_reuse_rates()
        worth = likelihood[:, None, :] * self._cost_by_depth[None, :, None]
        by_queue: list[list[float]] = worth.reshape(-1, likelihood.shape[1]).tolist()
        return by_queue
