"""Adds sampled tokens to sequences, and ends those that are complete or break their grammar."""

from baton.errors import GrammarFailed
from baton.types import FinishReason, TokenEvent, TokenLogprobs
from node_engine.core.scheduling.preemption import BlockReleaser
from node_engine.core.sequences.outcomes import (
    PrefillCompleted,
    SequenceFailed,
    SequenceOutcome,
    TokenEmitted,
)
from node_engine.core.sequences.sequence import (
    Sequence,
    SequenceState,
    SequenceTable,
)
from node_engine.core.sequences.stop_rules import finish_reason


class TokenAcceptor:
    """Decides what a sampled token means for its sequence. Compute thread only."""

    def __init__(
        self,
        sequences: SequenceTable,
        releaser: BlockReleaser,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
    ) -> None:
        self._sequences = sequences
        self._releaser = releaser
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len

    def accept_token(
        self, sequence: Sequence, token: int, score: TokenLogprobs | None
    ) -> SequenceOutcome:
        """Append a sampled token and change the sequence's state; returns the outcome."""
        reason = "" if sequence.constraint is None else sequence.constraint.accept_token(token)
        if reason:
            self._releaser.finish_sequence(sequence)
            return SequenceFailed(sequence, GrammarFailed(reason))
        sequence.token_ids.append(token)
        finish = self._find_finish_reason(sequence, token)
        event = TokenEvent(sequence.key, sequence.num_output_tokens - 1, token, finish, score)
        if sequence.is_prefill_only:
            self._sequences.change_state(sequence, SequenceState.HANDING_OFF)
            return PrefillCompleted(sequence, event)
        if finish is not None:
            self._releaser.finish_sequence(sequence)
        elif sequence.state is SequenceState.PREFILLING:
            self._sequences.change_state(sequence, SequenceState.RUNNING)
        return TokenEmitted(sequence, event)

    def _find_finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        if sequence.constraint is not None and sequence.constraint.is_complete:
            return FinishReason.STOP
        return finish_reason(
            sequence.work.request.sampling,
            self._eos_token_ids,
            self._max_model_len,
            last_token=token,
            num_generated=sequence.num_output_tokens,
            num_tokens=len(sequence.token_ids),
        )
