"""The sequences of a simulated decode node, all of whose tokens are the same."""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.types import AttemptKey, AttemptSpec, FinishReason, TokenEvent

SIMULATED_TOKEN = 7


@dataclass(slots=True)
class RunningSequence:
    """One attempt that emits tokens."""

    work: AttemptSpec
    context_len: int  # tokens of the prompt and of earlier attempts
    output_tokens: int  # those of earlier attempts included


class DecodeBatch:
    """What a decode node has reserved, and what it decodes, in the order of their starts."""

    def __init__(self) -> None:
        self._reserved: dict[AttemptKey, AttemptSpec] = {}
        self.running: dict[AttemptKey, RunningSequence] = {}

    def reserve_sequence(self, work: AttemptSpec) -> None:
        self._reserved[work.key] = work

    def start_reserved(self, key: AttemptKey) -> AttemptSpec | None:
        """Start what was reserved; None if it has been cancelled."""
        work = self._reserved.pop(key, None)
        if work is not None:
            self.start_sequence(work)
        return work

    def start_sequence(self, work: AttemptSpec) -> None:
        emitted = len(work.emitted_token_ids)
        context_len = len(work.request.prompt_token_ids) + emitted
        self.running[work.key] = RunningSequence(work, context_len, emitted)

    def cancel_sequence(self, key: AttemptKey) -> None:
        """Forget a sequence. Idempotent."""
        self._reserved.pop(key, None)
        self.running.pop(key, None)

    def emit_tokens(self, keys: Iterable[AttemptKey]) -> tuple[TokenEvent, ...]:
        """Return the next token of each sequence that still runs; the last one ends it."""
        events = []
        for key in keys:
            sequence = self.running.get(key)
            if sequence is None:
                continue
            index = sequence.output_tokens
            sequence.output_tokens += 1
            finish = None
            if sequence.output_tokens >= sequence.work.request.sampling.max_tokens:
                del self.running[key]
                finish = FinishReason.LENGTH
            events.append(TokenEvent(key, index, SIMULATED_TOKEN, finish))
        return tuple(events)
