"""A model of how soon a block is used again, learned per class of blocks.

Blocks are sorted into classes by how often they have been used. For each class the model counts how
many blocks entered it, and how many of those were used again at which age (seconds since their last
use, in buckets that grow geometrically). From these counts it computes, for a block that has been
idle for some age, the highest rate of uses that keeping it for some more time T can yield:

    index(age) = max over T of  P(used within T | idle for age) / E[time kept | kept for T at most]

This is the Gittins index of a job whose size is the time until the next use (Gittins 1979; Aalto,
Ayesta and Righter 2009). If blocks are independent, keeping those with the highest index is the
best stationary policy. Beckmann, Chen and Cidon (LHD, NSDI 2018) rank by the same ratio with
unlimited T. Within a class the block idle for longest is assumed to be the least likely to be used,
so that one queue per class is enough.

A class with few observations gets the average of all classes as its prior: without evidence that
classes differ, the order is that of LRU. The blocks of one prompt are used together, so the weight
of the prior is counted in prompts, not in blocks.
"""

import math

import numpy as np

_FIRST_BUCKET_SECONDS = 1.0  # upper end of the first bucket
_BUCKETS_PER_OCTAVE = 3
_NUM_BUCKETS = 48  # the last one begins at 11.5 hours
_PRIOR_PROMPTS = 50.0  # weight of the average in every class, in prompts
_MAX_ENTRIES = 1 << 18  # above this number of entries all counts are halved

IntArray = np.ndarray[tuple[int], np.dtype[np.intp]]
FloatArray = np.ndarray[tuple[int], np.dtype[np.float64]]


class ReuseModel:
    def __init__(self, num_classes: int) -> None:
        # Upper ends of the buckets, in seconds.
        self._edges = _FIRST_BUCKET_SECONDS * 2.0 ** (np.arange(_NUM_BUCKETS) / _BUCKETS_PER_OCTAVE)
        self._widths = np.diff(self._edges, prepend=0.0)
        self._entry_counts = [0.0] * num_classes
        self._reuse_counts = np.zeros((num_classes, _NUM_BUCKETS))
        self._num_prompts = 0  # prompts of which some blocks were found
        self._num_found_blocks = 0

    def record_entries(self, reuse_class: int, count: int = 1) -> None:
        """Count `count` blocks that are cached with this reuse class."""
        self._entry_counts[reuse_class] += count

    def remove_entry(self, reuse_class: int) -> None:
        """Undo `record_entries` for a block that was given the wrong reuse class."""
        self._entry_counts[reuse_class] = max(0.0, self._entry_counts[reuse_class] - 1)

    def record_reuse(self, reuse_class: int, age: float) -> None:
        """Count a use of one block, `age` seconds after its last use."""
        self._reuse_counts[reuse_class, self.age_bucket(age)] += 1

    def record_prompt_reuse(self, reuse_classes: IntArray, ages: FloatArray) -> None:
        """Count a use of all blocks that a prompt found; `ages` in seconds since their last use."""
        buckets = np.minimum(self._edges.searchsorted(ages, side="right"), _NUM_BUCKETS - 1)
        cells = reuse_classes * _NUM_BUCKETS + buckets
        self._reuse_counts += np.bincount(cells, minlength=self._reuse_counts.size).reshape(
            self._reuse_counts.shape
        )
        self._num_prompts += 1
        self._num_found_blocks += len(reuse_classes)

    def age_bucket(self, age: float) -> int:
        """Return the bucket of an age in seconds."""
        if age < _FIRST_BUCKET_SECONDS:
            return 0
        return min(
            1 + int(_BUCKETS_PER_OCTAVE * math.log2(age / _FIRST_BUCKET_SECONDS)), _NUM_BUCKETS - 1
        )

    def decay_counts(self) -> None:
        """Halve all counts when there are many, so that old observations weigh less."""
        if sum(self._entry_counts) > _MAX_ENTRIES:
            self._entry_counts = [count / 2 for count in self._entry_counts]
            self._reuse_counts /= 2

    def compute_reuse_rates(self) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """Return the Gittins index in uses per second, by class and bucket of age."""
        prior = _PRIOR_PROMPTS * max(1.0, self._num_found_blocks / max(1, self._num_prompts))
        average = self._reuse_counts.sum(axis=0) / max(sum(self._entry_counts), 1.0)
        entered = np.array(self._entry_counts) + prior
        reused = self._reuse_counts + prior * average
        return np.stack([self._gittins_index(*row) for row in zip(entered, reused, strict=True)])

    def _gittins_index(self, entered: float, reused: FloatArray) -> FloatArray:
        """Return the index of one class by bucket of age."""
        # Blocks that are still unused at the lower end of each bucket.
        idle = np.maximum(entered - np.concatenate([[0.0], np.cumsum(reused)]), 0.0)
        waits = (idle[:-1] + idle[1:]) / 2 * self._widths  # block-seconds spent in each bucket
        uses, seconds = (np.concatenate([[0.0], np.cumsum(values)]) for values in (reused, waits))
        # Uses gained and seconds spent from the start of a bucket (row) to the end of another.
        gained = uses[None, 1:] - uses[:-1, None]
        spent = seconds[None, 1:] - seconds[:-1, None]
        possible = np.triu(np.ones_like(gained, dtype=bool)) & (spent > 0)
        best: FloatArray = np.divide(gained, spent, out=np.zeros_like(gained), where=possible).max(
            axis=1
        )
        return best
