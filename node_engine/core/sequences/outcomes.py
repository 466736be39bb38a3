"""What became of sequences in a step: a closed union that the shell turns into messages."""

from dataclasses import dataclass

from baton.errors import BatonError
from baton.types import TokenEvent, TokenLogprobs
from node_engine.core.sequences.sequence import Sequence
from node_engine.core.step.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class TokenEmitted:
    """A token for the client. If `event.finish` is set the sequence is FINISHED and holds
    nothing."""

    sequence: Sequence
    event: TokenEvent


@dataclass(frozen=True, slots=True)
class PromptLogprobsComputed:
    """Scores of the prompt's tokens `first_position` .. `first + len(scores)`, in order and without
    a gap from 1 on. They come before what else the same step made of the sequence."""

    sequence: Sequence
    first_position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class PrefillCompleted:
    """The KV of the whole context is computed and the first token is sampled. The sequence is
    HANDING_OFF and keeps its blocks until it is released, also when `event.finish` says that
    nothing is left to decode."""

    sequence: Sequence
    event: TokenEvent


@dataclass(frozen=True, slots=True)
class PrefillRequeued:
    """A speculative sequence lost its blocks and is WAITING again. Nothing that was announced of it
    is valid any more: the hand-off has to be aborted; it will start over, with its prompt's
    scores."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """The sequence is FINISHED without an answer and holds nothing: Preempted, OutOfBlocks or
    TooLong. `preempting_class` is the class of whoever took a preempted one's blocks."""

    sequence: Sequence
    error: BatonError
    preempting_class: str = ""


SequenceOutcome = (
    TokenEmitted | PromptLogprobsComputed | PrefillCompleted | PrefillRequeued | SequenceFailed
)


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What `Scheduler.next_step` decided. `batch` is None when there is nothing to compute; the
    outcomes hold either way."""

    batch: StepBatch | None
    outcomes: tuple[SequenceOutcome, ...]
