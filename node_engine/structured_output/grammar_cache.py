"""Compiled grammars of a node: compiled once on threads, kept while they are used.

An entry is a matcher in its initial state, of which each sequence gets a copy: a copy shares the
tables that llguidance builds as it computes masks. The number of entries is bounded, and an entry
that was not used for some time is dropped. Grammars that are used only once, however many, do not
displace those that are used again. The coordinator has compiled every grammar before, in a
process with less memory than any of them may take.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from llguidance import LLMatcher

from baton.process.clock import Clock
from baton.types import StructuredOutput

USED_ONCE_SHARE = 0.25  # of the entries, for grammars that were used once
IDLE_SECONDS = 600.0  # after which an unused grammar is dropped, when another one is added


@dataclass(slots=True)
class _Entry:
    matcher: Future[LLMatcher]
    used_at: float  # clock time, in seconds
    is_reused: bool = False


class GrammarCache:
    """The compiled grammars of one node. Thread-safe."""

    def __init__(
        self,
        compile_grammar: Callable[[StructuredOutput], LLMatcher],
        max_entries: int,
        clock: Clock,
    ) -> None:
        self._compile_grammar = compile_grammar
        self._max_entries = max_entries
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first
        self.num_hits = self.num_misses = 0
        self.compile_seconds = 0.0  # of all compilations

    def __len__(self) -> int:
        return len(self._entries)

    def get_matcher(self, grammar: StructuredOutput) -> LLMatcher:
        """Return a matcher in the initial state, for the caller alone.

        Compiles the grammar, or waits for another thread that does. Raises GrammarError.
        """
        digest = grammar.digest
        with self._lock:
            entry = self._entries.get(digest)
            is_new = entry is None
            if entry is None:
                entry = self._entries[digest] = _Entry(Future(), self._clock())
                self._drop_entries()
                self.num_misses += 1
            else:
                self._entries.move_to_end(digest)
                entry.used_at = self._clock()
                entry.is_reused = True
                self.num_hits += 1
        if is_new:
            self._compile_entry(digest, entry, grammar)
        return entry.matcher.result().deep_copy()

    def drop_grammar(self, grammar: StructuredOutput) -> None:
        """Forget a grammar, because a limit of its shared tables was reached."""
        with self._lock:
            self._entries.pop(grammar.digest, None)

    def _compile_entry(self, digest: bytes, entry: _Entry, grammar: StructuredOutput) -> None:
        started = self._clock()
        try:
            entry.matcher.set_result(self._compile_grammar(grammar))
        except BaseException as error:  # other threads wait for the result
            with self._lock:
                self._entries.pop(digest, None)
            entry.matcher.set_exception(error)
        with self._lock:
            self.compile_seconds += self._clock() - started

    def _drop_entries(self) -> None:
        oldest = self._clock() - IDLE_SECONDS
        while len(self._entries) > 1:
            digest, entry = next(iter(self._entries.items()))
            if entry.used_at >= oldest:
                if len(self._entries) <= self._max_entries:
                    return
                digest = self._choose_surplus_entry()
            del self._entries[digest]

    def _choose_surplus_entry(self) -> bytes:
        """Return the least recently used entry, of those used once if they exceed their share."""
        used_once = [digest for digest, entry in self._entries.items() if not entry.is_reused]
        if len(used_once) > max(1, USED_ONCE_SHARE * self._max_entries):
            return used_once[0]
        return next(iter(self._entries))
