"""The live sequences of a node, found by key, by id and by state."""

from collections.abc import Iterator, Mapping

from baton.types import AttemptKey
from node_engine.core.blocks.block_ledger import BlockLedgerError
from node_engine.core.sequences.sequence import Sequence, SequenceState
from node_engine.core.step.step_batch import SequenceId


class SequenceTable:
    """All sequences that are not FINISHED, at most one per attempt key."""

    def __init__(self) -> None:
        self._by_key: dict[AttemptKey, Sequence] = {}
        self._by_state: dict[SequenceState, dict[SequenceId, Sequence]] = {
            state: {} for state in SequenceState
        }

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._by_key.values()))

    def get(self, key: AttemptKey) -> Sequence | None:
        return self._by_key.get(key)

    def require_sequence(self, key: AttemptKey, *states: SequenceState) -> Sequence:
        """Raises BlockLedgerError unless the sequence exists and is in one of `states`."""
        sequence = self._by_key.get(key)
        if sequence is None or sequence.state not in states:
            state = sequence.state.value if sequence else "unknown"
            raise BlockLedgerError(
                f"sequence {key} is {state}, not one of {[expected.value for expected in states]}"
            )
        return sequence

    def get_by_state(self, state: SequenceState) -> Mapping[SequenceId, Sequence]:
        return self._by_state[state]

    def add_sequence(self, sequence: Sequence) -> None:
        if sequence.key in self._by_key:
            raise BlockLedgerError(f"sequence {sequence.key} exists already")
        self._by_key[sequence.key] = sequence
        self._by_state[sequence.state][sequence.id] = sequence

    def change_state(self, sequence: Sequence, state: SequenceState) -> None:
        before = sequence.state
        sequence.change_state(state)
        del self._by_state[before][sequence.id]
        if state is SequenceState.FINISHED:
            del self._by_key[sequence.key]
        else:
            self._by_state[state][sequence.id] = sequence
