"""The live sequences of a node, found by key, by id and by state."""

from collections.abc import Iterator, Mapping

from baton.types import AttemptKey
from node_engine.core.ledger import LedgerError
from node_engine.core.sequence import Sequence, SequenceState
from node_engine.core.step import SequenceId


class SequenceTable:
    """Every sequence that is not FINISHED. At most one per attempt key."""

    def __init__(self) -> None:
        self._by_key: dict[AttemptKey, Sequence] = {}
        self._in: dict[SequenceState, dict[SequenceId, Sequence]] = {state: {} for state in SequenceState}

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._by_key.values()))

    def get(self, key: AttemptKey) -> Sequence | None:
        return self._by_key.get(key)

    def require(self, key: AttemptKey, *states: SequenceState) -> Sequence:
        sequence = self._by_key.get(key)
        if sequence is None or sequence.state not in states:
            state = sequence.state.value if sequence else "unknown"
            raise LedgerError(f"sequence {key} is {state}, not one of {[wanted.value for wanted in states]}")
        return sequence

    def within(self, state: SequenceState) -> Mapping[SequenceId, Sequence]:
        return self._in[state]

    def enter(self, sequence: Sequence) -> None:
        if sequence.key in self._by_key:
            raise LedgerError(f"there is a sequence {sequence.key} already")
        self._by_key[sequence.key] = sequence
        self._in[sequence.state][sequence.id] = sequence

    def move(self, sequence: Sequence, state: SequenceState) -> None:
        before = sequence.state
        sequence.become(state)
        del self._in[before][sequence.id]
        if state is SequenceState.FINISHED:
            del self._by_key[sequence.key]
        else:
            self._in[state][sequence.id] = sequence
