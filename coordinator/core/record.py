"""One request's state, and the automaton that it follows.

submit
  |
  v      place            blocks set aside            first token
QUEUED --------> PLACED --------------------> RESERVED ----------> STREAMING ------> FINISHED
  ^                |  |                          |                  ^    |   last
  |                |  +--- first token, no blocks needed elsewhere -+    |   token
  |                |       (prefill alone or EOS; colocated)             |
  +--- re-place ---+-----------------------------+-----------------------+

any of the first four ------ deadline, cancel, error that no other attempt can mend ------> FAILED
any of the first four ------ its reader has all that it wants ----------------------------> FINISHED
"""

from collections.abc import Container
from dataclasses import dataclass, field, replace
from enum import Enum

from baton.types import AttemptKey, Incarnation, Request, RequestId, TokenEvent, TokenScore, Work
from coordinator.core.breakers import Pair
from coordinator.core.counters import INTERNAL
from coordinator.core.messages import Admitted, PrefillEnded
from coordinator.core.names import PromptNames
from coordinator.core.notes import Notes
from coordinator.core.sources import Sources
from coordinator.core.timeline import Marks

MAX_TRIED = 16  # attempts that are remembered: the first half and the last


class RequestState(Enum):
    QUEUED = "queued"
    PLACED = "placed"
    RESERVED = "reserved"
    STREAMING = "streaming"
    FINISHED = "finished"
    FAILED = "failed"


TERMINAL = frozenset({RequestState.FINISHED, RequestState.FAILED})

_NEXT: dict[RequestState, frozenset[RequestState]] = {
    RequestState.QUEUED: frozenset({RequestState.PLACED, *TERMINAL}),
    RequestState.PLACED: frozenset({RequestState.RESERVED, RequestState.STREAMING, RequestState.QUEUED, *TERMINAL}),
    RequestState.RESERVED: frozenset({RequestState.STREAMING, RequestState.QUEUED, *TERMINAL}),
    RequestState.STREAMING: frozenset({RequestState.QUEUED, *TERMINAL}),
    RequestState.FINISHED: frozenset(),
    RequestState.FAILED: frozenset(),
}


@dataclass(slots=True)
class Attempt:
    """One try. `legs` are the nodes that still work on it; `prefill` and `decode` those that it was given to.
    `prompt_scores` are those that have come, `held` tokens of decode that wait for the rest of them."""

    key: AttemptKey
    prefill: Incarnation | None
    decode: Incarnation | None
    notes: Notes
    legs: set[Incarnation] = field(default_factory=set)
    ended: PrefillEnded | None = None
    admitted: Admitted | None = None
    handed_off: bool = False
    committed: bool = False  # decode runs it
    prompt_scores: list[TokenScore] = field(default_factory=list)
    held: list[TokenEvent] = field(default_factory=list)
    transport: str = ""
    counted: bool = False  # its prompt tokens are in the books
    answer_by: float | None = None  # decode must have said Reserved or Refused by then

    @property
    def pair(self) -> Pair | None:
        """Between whom a hand-off is, if it takes one."""
        return (self.prefill, self.decode) if self.prefill is not None and self.decode is not None else None

    @property
    def computes(self) -> Incarnation | None:
        """The node that computes the prompt, and so its scores."""
        return self.prefill or self.decode


@dataclass(slots=True)
class Record:
    """`admit_by` is set while nobody could serve the request: it is not accepted yet. Times on the brain's clock.

    `holder` is a decode node whose cache has the prompt, because another request brought it there. `prompt_scores` are
    complete, or None if they are not or nobody asked. `others` are those that came in with it, if it is the first of
    them: further choices of one answer. `pin`: a node out of service that this request, a probe, is to go through."""

    request: Request
    deadline: float
    marks: Marks
    internal: bool
    state: RequestState = RequestState.QUEUED
    emitted: list[int] = field(default_factory=list)
    attempt: Attempt | None = None
    attempts: int = 0
    tried: list[Attempt] = field(default_factory=list)
    failures: int = 0
    admit_by: float | None = None
    not_before: float | None = None  # it rests, out of the queue, after attempts that failed one upon the other
    avoid: frozenset[Incarnation] = frozenset()
    others: tuple[RequestId, ...] = ()
    holder: Incarnation | None = None
    prompt_scores: tuple[TokenScore, ...] | None = None
    sources: Sources | None = None
    replaced_because: str = ""
    prefill_payer: str = ""  # class that pays for computing the context again: who preempted the last attempt
    held_back: float = 0.0  # seconds, by the retry budget, since its last attempt
    pin: Incarnation | None = None
    cached_before: int = 0  # tokens of its prompt that some cache seemed to have when it was first placed
    names: PromptNames | None = None  # of the prompt's blocks, once placement has been tried
    model: bytes = b""  # digest of the identity that it was admitted under: nothing else may answer it

    @property
    def tenant_class(self) -> str:
        """Its class in metrics."""
        return INTERNAL if self.internal else self.request.standing.tenant_class

    @property
    def remaining(self) -> int:
        return self.request.sampling.max_tokens - len(self.emitted)

    @property
    def context_tokens(self) -> int:
        return len(self.request.prompt) + len(self.emitted)

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the longest output that was asked for."""
        return len(self.request.prompt) + self.request.sampling.max_tokens

    @property
    def awaits_scores(self) -> bool:
        """The prompt's scores were asked for and are not complete: nothing may be shown yet."""
        return self.request.sampling.prompt_logprobs is not None and self.prompt_scores is None

    def blamed(self, attempt: Attempt, members: Container[Incarnation]) -> frozenset[Incarnation]:
        """Whom the next attempt had better avoid: a node that is no more, else all that had a part in this one. Once
        decode runs it, its writer has none any more, and what it computed is in its cache."""
        writing = not attempt.committed or self.awaits_scores
        nodes = frozenset(filter(None, (attempt.prefill if writing else None, attempt.decode)))
        return frozenset(node for node in nodes if node not in members) or nodes

    def begin(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.tried.append(attempt)
        if len(self.tried) > MAX_TRIED:
            del self.tried[MAX_TRIED // 2]

    def work(self, key: AttemptKey, now: float) -> Work:
        """What is left to do, as nodes are told for this attempt."""
        sampling = self.request.sampling
        if sampling.prompt_logprobs is not None and not self.awaits_scores:
            sampling = replace(sampling, prompt_logprobs=None)  # so that it may use caches
        left = replace(self.request, sampling=sampling, timeout=self.deadline - now)
        return Work(key, left, tuple(self.emitted), self.prefill_payer, self.model)

    def to(self, state: RequestState) -> None:
        if state not in _NEXT[self.state]:
            raise AssertionError(f"request {self.request.id} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def next_due(self) -> float:
        """The next moment at which time alone changes something for this request."""
        due = self.deadline
        if self.admit_by is not None:
            due = min(due, self.admit_by)
        if self.not_before is not None:
            due = min(due, self.not_before)
        if self.attempt is not None and self.attempt.answer_by is not None:
            due = min(due, self.attempt.answer_by)
        return due
