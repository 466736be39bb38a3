"""Computes the masks of grammars on a thread of their own, while the steps that need them run."""

import queue
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from baton.process import log
from baton.process.clock import Clock, monotonic_clock

Words = npt.NDArray[np.int32]


class PendingMask:
    """The mask of the next token of one sequence; see `TokenMask`."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        excluded: tuple[int, ...],
        clock: Clock = monotonic_clock,
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._excluded_token_ids = excluded
        self._clock = clock
        self._words: Words | None = None
        self._has_failed = False
        self.seconds = 0.0  # that the computation took
        self._lock = threading.Lock()  # held while the matcher is used

    @property
    def is_ready(self) -> bool:
        """Whether nobody would wait for the mask: it is computed, or that has failed."""
        return self._words is not None or self._has_failed

    def compute_ahead(self) -> None:
        """Compute the mask, so that nobody waits for it. An error is left to who needs the mask."""
        try:
            self.wait_for_words()
        except Exception as error:
            self._has_failed = True
            log.get_logger("grammar").error("mask not computed", **log.get_error_fields(error))

    def wait_for_words(self) -> Words:
        """Return the mask; compute it now unless another thread has, or is computing it.

        The mask of a matcher that has failed allows every token: the drawn one is then rejected.
        """
        with self._lock:
            if self._words is None:
                started = self._clock()
                self._words = self._compute_words()
                self.seconds = self._clock() - started
            return self._words

    def discard(self) -> None:
        """From now on no thread uses the matcher for this mask."""
        with self._lock:
            if self._words is None:
                self._words = _allow_all(self._vocab_size)

    def _compute_words(self) -> Words:
        bits = self._matcher.compute_bitmask()
        words = np.frombuffer(bits, np.int32)[: _count_words(self._vocab_size)].copy()
        if self._vocab_size % 32:  # a tokenizer may have more tokens than the model
            words[-1] &= (1 << self._vocab_size % 32) - 1
        if self._matcher.is_error() or not words.any():
            return _allow_all(self._vocab_size)
        remaining = words.copy()
        for token in self._excluded_token_ids:
            if token < self._vocab_size:
                remaining.view(np.uint32)[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        return remaining if remaining.any() else words


class MaskThread:
    """Computes masks in the order in which they were requested, until it is closed."""

    def __init__(self) -> None:
        # None ends the thread.
        self._requests: queue.SimpleQueue[tuple[PendingMask, bool] | None] = queue.SimpleQueue()
        # Called on this thread when a mask is computed whose sequence stays out of steps.
        self.on_awaited_mask: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="masks", daemon=True)
        self._thread.start()

    def request_mask(
        self, matcher: LLMatcher, vocab_size: int, excluded: tuple[int, ...], *, is_awaited: bool
    ) -> PendingMask:
        """Begin to compute the mask of a matcher, which the caller does not use meanwhile.

        `is_awaited`: no step needs it yet, and `on_awaited_mask` is called when it is there.
        """
        mask = PendingMask(matcher, vocab_size, excluded)
        self._requests.put((mask, is_awaited))
        return mask

    def close(self) -> None:
        """End the thread after the masks that were requested. No more may be requested.

        Returns when it has ended. Idempotent.
        """
        self._requests.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            mask, is_awaited = request
            mask.compute_ahead()
            if is_awaited:
                self.on_awaited_mask()


def _count_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def _allow_all(vocab_size: int) -> Words:
    return np.full(_count_words(vocab_size), -1, np.int32)
