"""Effects: what the brain asks its shell to do, collected in order until the shell takes them.

What waits for its shell besides: a pass over the waiting requests, and one timer per request.
"""

import heapq
from dataclasses import dataclass

from baton.cluster_link.messages import NodeOrder
from baton.errors import BatonError
from baton.role_split import RoleSplit
from baton.types import (
    AttemptKey,
    FinishReason,
    Incarnation,
    NodeName,
    RequestId,
    Role,
    TokenLogprobs,
)
from coordinator.core.common.breaker_state import BreakerState
from coordinator.core.common.timeline import Timeline

_MAX_STALE_ENTRIES = 1024  # stale heap entries up to which the heap is not rebuilt


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Send an order to a node or a pool."""

    incarnation: Incarnation
    order: NodeOrder


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    """The request is accepted: from here on it ends only with `EndRequest`."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """Send output tokens to the client."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    # one for each token if the request asks for them, else empty
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class EmitPromptLogprobs:
    """Send the logprobs of the whole prompt; once, before the first `EmitTokens`."""

    request_id: RequestId
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class FinishedResult:
    """How a request ended that was served."""

    reason: FinishReason
    cached_tokens: int  # prompt tokens that the first placement did not have to compute


@dataclass(frozen=True, slots=True)
class EndRequest:
    """The one terminal event of a request."""

    request_id: RequestId
    result: FinishedResult | BatonError
    output_tokens: int  # tokens that the client was sent
    timeline: Timeline
    ttft_seconds: float | None  # None if no token was sent
    is_internal: bool  # a warm-up or a probe, which no client made
    tenant_class: str = "default"  # the class label of metrics


@dataclass(frozen=True, slots=True)
class AttemptReplaced:
    """An attempt was given up and its request will be placed again; only for the log."""

    key: AttemptKey
    reason: str


@dataclass(frozen=True, slots=True)
class MemberLost:
    """The incarnation is no longer a member: end its stream."""

    incarnation: Incarnation
    name: NodeName
    error: BatonError
    is_expected: bool = False  # it was ordered to rejoin in another role


@dataclass(frozen=True, slots=True)
class BreakerChanged:
    """The circuit breaker of two nodes has changed its state; only for the log."""

    prefill_node: NodeName
    decode_node: NodeName
    state: BreakerState


@dataclass(frozen=True, slots=True)
class RoleSwitchReport:
    """A role switch is over, for the log and metrics; phases not reached take 0 seconds."""

    node: NodeName
    source_role: Role
    target_role: Role
    outcome: str  # done, recalled (while draining), superseded, or lost
    drain_seconds: float
    switch_seconds: float
    probe_seconds: float
    detail: str
    generation: int


@dataclass(frozen=True, slots=True)
class RatioChanged:
    """The planner has changed the ratio to keep the SLO; only for the log."""

    target_split: RoleSplit
    reason: str


@dataclass(frozen=True, slots=True)
class DegradationChanged:
    """A degradation step was taken, or taken back; only for the log."""

    step: str
    is_taken: bool
    pressure: float


Effect = (
    DegradationChanged
    | SendOrder
    | AdmitRequest
    | EmitPromptLogprobs
    | EmitTokens
    | EndRequest
    | AttemptReplaced
    | MemberLost
    | BreakerChanged
    | RoleSwitchReport
    | RatioChanged
)


class EffectLog:
    """The effects of the calls since the shell last took them."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def append_effect(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send_order(self, node: Incarnation, order: NodeOrder) -> None:
        self._effects.append(SendOrder(node, order))

    def take_effects(self) -> list[Effect]:
        """Return the effects that have collected since the last call, oldest first."""
        effects, self._effects = self._effects, []
        return effects


class PlacementSignal:
    """Set when something has changed that may let a waiting request be placed."""

    def __init__(self) -> None:
        self._is_set = False

    def request_pass(self) -> None:
        """Request a pass over the waiting requests before effects are taken."""
        self._is_set = True

    def take_request(self) -> bool:
        """Return whether a pass was requested since the last call."""
        was_set, self._is_set = self._is_set, False
        return was_set


class RequestTimers:
    """A heap of deadlines. Setting a timer replaces the request's previous one; stale heap entries
    are dropped when they reach the top, or all at once when there are many."""

    def __init__(self) -> None:
        self._deadlines: dict[RequestId, float] = {}
        self._heap: list[tuple[float, RequestId]] = []

    def set_timer(self, name: RequestId, when: float) -> None:
        if self._deadlines.get(name) != when:
            self._deadlines[name] = when
            heapq.heappush(self._heap, (when, name))
            if len(self._heap) > 2 * len(self._deadlines) + _MAX_STALE_ENTRIES:
                self._heap = [(time, name) for name, time in self._deadlines.items()]
                heapq.heapify(self._heap)

    def cancel_timer(self, name: RequestId) -> None:
        self._deadlines.pop(name, None)

    def pop_due(self, now: float) -> list[RequestId]:
        """Remove and return the requests whose timer is due at `now`, earliest first."""
        found: list[RequestId] = []
        while (first := self.next_timer_at()) is not None and first <= now:
            name = heapq.heappop(self._heap)[1]
            del self._deadlines[name]
            found.append(name)
        return found

    def next_timer_at(self) -> float | None:
        while self._heap and self._deadlines.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
