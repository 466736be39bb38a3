"""Outcomes of a step for its sequences: a closed union that the role turns into messages."""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.errors import BatonError
from baton.types import TokenEvent, TokenLogprobs
from node_engine.core.sequences.sequence import Sequence
from node_engine.core.speculation.drafting import DraftResult
from node_engine.core.step.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class TokenEmitted:
    """An output token. If `event.finish_reason` is set, the sequence is FINISHED without blocks."""

    sequence: Sequence
    event: TokenEvent


@dataclass(frozen=True, slots=True)
class DraftsVerified:
    """A step has verified draft tokens of a running sequence. Follows its tokens."""

    sequence: Sequence
    result: DraftResult


@dataclass(frozen=True, slots=True)
class PromptLogprobsComputed:
    """Logprobs of consecutive prompt tokens, the first of them at `first_position`.

    Positions start at 1 and come in order without gaps. This outcome precedes the other outcomes of
    the same sequence and step.
    """

    sequence: Sequence
    first_position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class PrefillCompleted:
    """The KV of the whole context is computed and the first token is sampled.

    The sequence is HANDING_OFF and keeps its blocks until it is released, even if
    `event.finish_reason` says that nothing is left to decode.
    """

    sequence: Sequence
    event: TokenEvent


@dataclass(frozen=True, slots=True)
class PrefillRequeued:
    """An unticketed prefill lost its blocks and is WAITING again.

    Layers announced for it are no longer valid: the hand-off must be aborted. The prefill starts
    over, prompt logprobs included.
    """

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """The sequence is FINISHED with an error and holds no blocks."""

    sequence: Sequence
    error: BatonError  # Preempted, OutOfBlocks or ContextLengthExceeded
    preempting_class: str = ""  # of a preemption: the tenant class that took the blocks


SequenceOutcome = (
    TokenEmitted
    | DraftsVerified
    | PromptLogprobsComputed
    | PrefillCompleted
    | PrefillRequeued
    | SequenceFailed
)


def count_accepted_drafts(outcomes: Iterable[SequenceOutcome]) -> int:
    """Draft tokens that a step has accepted, of all sequences."""
    verified = (outcome for outcome in outcomes if isinstance(outcome, DraftsVerified))
    return sum(drafts.result.num_accepted for drafts in verified)


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """The decision of `Scheduler.schedule_step`."""

    batch: StepBatch | None  # None if there is nothing to compute; `outcomes` may still have some
    outcomes: tuple[SequenceOutcome, ...]
