"""How likely a block is to be wanted again, learned from what happens to blocks like it.

Blocks are sorted into classes by how often they have been used. For each class two things are
counted: how many blocks entered it, and how many of those were used again at which age (seconds
since their last use, in buckets that grow geometrically). From that follows, for a block that has
been idle for some age, the most uses per second of waiting that keeping it for some time longer can
be expected to bring,

    index(age) = max over T of  P(used within T | idle for age) / E[time kept | kept for T at most],

which is the Gittins index of a job whose size is the time until the next use (Gittins 1979; Aalto,
Ayesta and Righter
2009); keeping what has the highest is the best stationary choice if blocks are independent. Beckmann, Chen and Cidon
(LHD, NSDI 2018) rank by the same ratio with T without end. Within a class the longest idle block is
taken for the least likely, so that one queue a class is enough.

A class that has seen little is taken for the average of all: with no evidence that classes differ,
the order is LRU's. The blocks of one prompt share its fate, so evidence is counted in prompts.
"""

import math

import numpy as np

_FIRST_BUCKET_SECONDS = 1.0  # second: the upper end of the first bucket
_BUCKETS_PER_OCTAVE = 3
_NUM_BUCKETS = 48  # the last one ends after a day
_PRIOR_PROMPTS = 50.0  # prompts' worth of the average in every class
_MAX_ENTRIES = 1 << 18  # entries; beyond, everything counts half

IntArray = np.ndarray[tuple[int], np.dtype[np.intp]]
FloatArray = np.ndarray[tuple[int], np.dtype[np.float64]]


class ReuseModel:
    def __init__(self, num_classes: int) -> None:
        self._edges = _FIRST_BUCKET_SECONDS * 2.0 ** (
            np.arange(_NUM_BUCKETS) / _BUCKETS_PER_OCTAVE
        )  # upper ends
        self._widths = np.diff(self._edges, prepend=0.0)
        self._entry_counts = [0.0] * num_classes
        self._reuse_counts = np.zeros((num_classes, _NUM_BUCKETS))
        self._num_prompts = 0  # that found something
        self._num_found_blocks = 0  # blocks, by them

    def record_entries(self, kind: int, count: int = 1) -> None:
        self._entry_counts[kind] += count

    def remove_entry(self, kind: int) -> None:
        """A block was in the wrong class: it does not count there."""
        self._entry_counts[kind] = max(0.0, self._entry_counts[kind] - 1)

    def record_reuse(self, kind: int, age: float) -> None:
        self._reuse_counts[kind, self.age_bucket(age)] += 1

    def record_prompt_reuse(self, kinds: IntArray, ages: FloatArray) -> None:
        """The blocks that a prompt found."""
        places = kinds * _NUM_BUCKETS + np.minimum(
            self._edges.searchsorted(ages, side="right"), _NUM_BUCKETS - 1
        )
        self._reuse_counts += np.bincount(places, minlength=self._reuse_counts.size).reshape(
            self._reuse_counts.shape
        )
        self._num_prompts += 1
        self._num_found_blocks += len(kinds)

    def age_bucket(self, age: float) -> int:
        if age < _FIRST_BUCKET_SECONDS:
            return 0
        return min(
            1 + int(_BUCKETS_PER_OCTAVE * math.log2(age / _FIRST_BUCKET_SECONDS)), _NUM_BUCKETS - 1
        )

    def decay_counts(self) -> None:
        """What was long ago counts for less."""
        if sum(self._entry_counts) > _MAX_ENTRIES:
            self._entry_counts = [count / 2 for count in self._entry_counts]
            self._reuse_counts /= 2

    def compute_reuse_rates(self) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """Expected uses per second, by class and bucket of age."""
        prior = _PRIOR_PROMPTS * max(1.0, self._num_found_blocks / max(1, self._num_prompts))
        average = self._reuse_counts.sum(axis=0) / max(sum(self._entry_counts), 1.0)
        entered = np.array(self._entry_counts) + prior
        reused = self._reuse_counts + prior * average
        return np.stack([self._gittins_index(*one) for one in zip(entered, reused, strict=True)])

    def _gittins_index(self, entered: float, reused: FloatArray) -> FloatArray:
        idle = np.maximum(
            entered - np.concatenate([[0.0], np.cumsum(reused)]), 0.0
        )  # at the lower ends
        waits = (idle[:-1] + idle[1:]) / 2 * self._widths  # block-seconds spent in each bucket
        uses, seconds = (np.concatenate([[0.0], np.cumsum(one)]) for one in (reused, waits))
        gained = (
            uses[None, 1:] - uses[:-1, None]
        )  # from the beginning of a bucket (row) to the end of another
        spent = seconds[None, 1:] - seconds[:-1, None]
        possible = np.triu(np.ones_like(gained, dtype=bool)) & (spent > 0)
        best: FloatArray = np.divide(gained, spent, out=np.zeros_like(gained), where=possible).max(
            axis=1
        )
        return best
