"""The shell around the brain: carries out its effects and keeps its timer, on one event loop.

It connects the brain with front ends, the nodes' streams and operators, and decides nothing. The
events of each request go into a stream of its own.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from baton.cluster_link.messages import (
    Heartbeat,
    LinkControl,
    NodeLeaving,
    NodeOrder,
    NodeReport,
)
from baton.config.coordinator_config import CoordinatorConfig
from baton.errors import (
    BatonError,
    Cancelled,
    ShuttingDown,
    SlowReader,
)
from baton.limits import ModelBounds
from baton.process import log
from baton.process.clock import Clock, monotonic_clock
from baton.types import FinishReason, Incarnation, Principal, Request, RequestId
from coordinator.core.admission.tenants import TenantTable
from coordinator.core.common.effects import (
    AdmitRequest,
    AttemptReplaced,
    BreakerChanged,
    DegradationChanged,
    Effect,
    EmitPromptLogprobs,
    EmitTokens,
    EndRequest,
    FinishedResult,
    MemberLost,
    RatioChanged,
    RoleSwitchReport,
    SendOrder,
)
from coordinator.core.common.timeline import Timeline
from coordinator.core.membership.join_checks import ServedModel
from coordinator.core.requests.table import RESTART_SECONDS
from coordinator.generation import FinishedEvent, GenerationEvent, PromptLogprobsEvent, TokensEvent
from coordinator.node_links.brain_factory import build_brain, effective_mode
from coordinator.node_links.change_log import log_change, log_role_switch

MAX_UNREAD_TOKENS = 1024  # tokens that a slow reader may leave unread
_MIN_TIMER_SECONDS = 0.001  # event loops round to milliseconds
_log = log.get_logger("dispatcher")


class GenerationStream:
    """A `Generation`, written by the dispatcher and read by one task on the same event loop."""

    def __init__(
        self,
        request: RequestId,
        cancel: Callable[[RequestId], None],
        stop: Callable[[RequestId], None],
    ) -> None:
        self._id = request
        self._cancel = cancel
        self._stop = stop
        self._events: deque[GenerationEvent] = deque()
        self._unread_tokens = 0
        self._error: BatonError | None = None
        self._timeline = Timeline()
        self._is_ended = False
        self._is_admitted = False
        self._wake: asyncio.Event = asyncio.Event()

    @property
    def id(self) -> RequestId:
        return self._id

    def cancel(self) -> None:
        if not self._is_ended:
            self._cancel(self._id)

    def stop(self) -> None:
        """End the generation normally, because the client has all that it wants.

        An error that came after that, and that nobody has read yet, becomes a normal end too.
        """
        if not self._is_ended:
            self._stop(self._id)
        elif self._error is not None:
            self._error = None
            self._events.append(FinishedEvent(FinishReason.STOP, 0, self._timeline))

    def mark_admitted(self) -> None:
        self._is_admitted = True
        self._wake.set()

    def push_prompt_logprobs(self, scores: PromptLogprobsEvent) -> None:
        """Add the logprobs of the prompt, which do not count as unread tokens."""
        self._events.append(scores)
        self._wake.set()

    def push_tokens(self, event: TokensEvent) -> bool:
        """Add tokens. Return False if the reader has fallen too far behind."""
        self._events.append(event)
        self._unread_tokens += len(event.token_ids)
        self._wake.set()
        return self._unread_tokens <= MAX_UNREAD_TOKENS

    def end_stream(self, result: FinishedEvent | BatonError, timeline: Timeline) -> None:
        self._timeline = timeline
        if isinstance(result, FinishedEvent):
            self._events.append(result)
        else:
            self._error = result
        self._is_ended = True
        self._wake.set()

    async def wait_until_admitted(self) -> None:
        """Wait until the request is admitted. Raises the error that ended it before."""
        while not self._is_admitted:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        try:
            while True:
                while self._events:
                    event = self._events.popleft()
                    if isinstance(event, TokensEvent):
                        self._unread_tokens -= len(event.token_ids)
                    yield event
                if self._is_ended:
                    break
                self._wake.clear()
                await self._wake.wait()
        finally:
            self.cancel()  # in case the reader has left early or was cancelled
        if self._error is not None:
            raise self._error


class NodeConnection(Protocol):
    """A node's stream as the dispatcher sees it."""

    def send_order(self, order: NodeOrder | LinkControl) -> None:
        """Queue an order. Never blocks: a stream that cannot keep up closes itself."""
        ...

    def close(self) -> None:
        """End the stream of a node that is no longer a member. Idempotent; calls nothing back."""
        ...


class Dispatcher:
    """The `GenerationBackend` of the front ends, and the registry of the nodes' streams."""

    def __init__(
        self,
        config: CoordinatorConfig,
        clock: Clock = monotonic_clock,
        served: ServedModel | None = None,
    ) -> None:
        """Nodes that join are compared with `served`, the model as far as it is known.

        Raises ConfigError.
        """
        self._config = config
        self.brain = build_brain(config, served)
        self.clock = clock
        self.mode = effective_mode(config)
        self.node_connections: dict[Incarnation, NodeConnection] = {}
        self.on_request_end: list[Callable[[EndRequest], None]] = []
        self.on_cluster_change: list[
            Callable[[], None]
        ] = []  # a node came, went, reported or switched
        self.on_role_switch: list[Callable[[RoleSwitchReport], None]] = []
        self._generation_streams: dict[RequestId, GenerationStream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_at = 0.0
        self._is_closing = False  # we end the nodes' streams ourselves
        self._pending_effects: deque[Effect] = deque()
        self._is_applying_effects = False
        self._idle = asyncio.Event()
        self._idle.set()
        if config.ratio_auto:
            self.brain.ratio_controller.enable_auto(None, config.flip_timeout, clock())

    # for the front ends

    def get_model_bounds(self) -> ModelBounds:
        return self.brain.get_model_bounds()

    async def submit_request(self, request: Request, *, internal: bool = False) -> GenerationStream:
        """See `GenerationBackend.submit_request`. `internal` requests have a class of their own."""
        (stream,) = await self.submit_requests([request], internal=internal)
        return stream

    async def submit_requests(
        self, requests: Sequence[Request], *, internal: bool = False
    ) -> list[GenerationStream]:
        """See `GenerationBackend.submit_requests`."""
        effects = self.brain.submit_requests(requests, self.clock(), internal=internal)
        streams = [
            GenerationStream(request.id, self._cancel_for_client, self._stop_for_client)
            for request in requests
        ]
        self._generation_streams.update((stream.id, stream) for stream in streams)
        self._idle.clear()
        self.apply_effects(effects)
        try:
            for stream in streams:
                await stream.wait_until_admitted()
        except BaseException:  # cancelled, or one was not admitted: then none is
            for stream in streams:
                stream.cancel()
            raise
        return streams

    def require_admission(self, principal: Principal, count: int, timeout: float) -> None:
        """See `GenerationBackend.require_admission`."""
        self.brain.require_admission(principal, count, timeout, self.clock())

    def reload_tenants(self, tenants: TenantTable) -> None:
        self.apply_effects(self.brain.reload_tenants(tenants, self.clock()))

    async def drain_requests(self, timeout_seconds: float) -> None:
        """Refuse new requests and wait for running ones; then end the rest with ShuttingDown."""
        self.brain.start_draining()
        self.notify_cluster_change()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            error = ShuttingDown(
                f"the cluster has stopped: {timeout_seconds:g} s had passed (--drain-timeout)",
                retry_after=RESTART_SECONDS,
            )
            for request in self.brain.list_active_requests():
                self._cancel_request(request, error)

    # for operators and node links

    def apply_effects(self, effects: Sequence[Effect]) -> None:
        """Carry out effects in order. Carrying one out may add others to the end of the queue."""
        self._pending_effects.extend(effects)
        if self._is_applying_effects:
            return
        self._is_applying_effects = True
        try:
            while self._pending_effects:
                self._apply_effect(self._pending_effects.popleft())
        finally:
            self._is_applying_effects = False
        self._schedule_timer()

    def notify_cluster_change(self) -> None:
        for callback in self.on_cluster_change:
            callback()

    def close(self) -> None:
        """Stop the timer and disconnect every node."""
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        for link in list(self.node_connections.values()):
            link.close()

    # for node links

    def add_member(
        self, incarnation: Incarnation, link: NodeConnection, effects: Sequence[Effect]
    ) -> None:
        """Add the stream of a node or pool that has joined, with the effects of its join."""
        self.node_connections[incarnation] = link
        self.apply_effects(effects)
        self.notify_cluster_change()

    def receive_report(self, sender: Incarnation, message: NodeReport) -> None:
        self.apply_effects(self.brain.receive_report(sender, message, self.clock()))
        if isinstance(message, Heartbeat | NodeLeaving):
            self.notify_cluster_change()

    def remove_member(self, incarnation: Incarnation, reason: BatonError) -> None:
        """Remove a node or pool whose stream has ended. Idempotent."""
        self.apply_effects(self.brain.remove_member(incarnation, reason, self.clock()))

    # internal

    def _cancel_for_client(self, request: RequestId) -> None:
        self._cancel_request(request, Cancelled("the client has gone away"))

    def _stop_for_client(self, request: RequestId) -> None:
        self.apply_effects(self.brain.stop_request(request, self.clock()))

    def _cancel_request(self, request: RequestId, error: BatonError) -> None:
        self.apply_effects(self.brain.cancel_request(request, error, self.clock()))

    def _apply_effect(self, effect: Effect) -> None:
        match effect:
            case EmitTokens():
                self._push_tokens(effect)
            case EmitPromptLogprobs(request, scores):
                stream = self._generation_streams.get(request)
                if stream is not None:
                    stream.push_prompt_logprobs(PromptLogprobsEvent(scores))
            case SendOrder(node, order):
                link = self.node_connections.get(node)
                if link is not None:
                    link.send_order(order)
            case AdmitRequest(request):
                stream = self._generation_streams.get(request)
                if stream is not None:
                    stream.mark_admitted()
            case EndRequest():
                self._end_request(effect)
            case RoleSwitchReport():
                self._report_role_switch(effect)
            case MemberLost():
                self._drop_member(effect)
            case AttemptReplaced() | BreakerChanged():
                log_change(effect)
            case DegradationChanged() | RatioChanged():
                log_change(effect)
                self.notify_cluster_change()

    def _push_tokens(self, emitted: EmitTokens) -> None:
        request = emitted.request_id
        stream = self._generation_streams.get(request)
        if stream is not None and not stream.push_tokens(
            TokensEvent(emitted.token_ids, emitted.logprobs)
        ):
            error = SlowReader(f"the client left more than {MAX_UNREAD_TOKENS} tokens unread")
            self._cancel_request(request, error)

    def _drop_member(self, lost: MemberLost) -> None:
        write_log, event = _log.warning, "node lost"
        if self._is_closing:
            write_log, event = _log.info, "node disconnected at shutdown"
        elif lost.is_expected:
            write_log, event = _log.info, "node rejoining"
        write_log(event, node=lost.name, incarnation=lost.incarnation, reason=lost.error.message)
        link = self.node_connections.pop(lost.incarnation, None)
        if link is not None:
            link.close()
        self.notify_cluster_change()

    def _end_request(self, end: EndRequest) -> None:
        stream = self._generation_streams.pop(end.request_id, None)
        result, timeline = end.result, end.timeline
        if stream is not None:
            if isinstance(result, FinishedResult):
                stream.end_stream(
                    FinishedEvent(result.reason, result.cached_tokens, timeline), timeline
                )
            else:
                stream.end_stream(result, timeline)
        if not self._generation_streams:
            self._idle.set()
        for callback in self.on_request_end:
            callback(end)
        outcome = result.reason.value if isinstance(result, FinishedResult) else result.code
        _log.info(
            "request ended",
            request=end.request_id,
            outcome=outcome,
            attempts=timeline.attempts,
            seconds=timeline.total,
        )

    def _report_role_switch(self, switch: RoleSwitchReport) -> None:
        log_role_switch(switch)
        for callback in self.on_role_switch:
            callback(switch)
        self.notify_cluster_change()

    def _schedule_timer(self) -> None:
        """Set the timer to the brain's next deadline. A timer that fires early does no harm."""
        due = self.brain.next_tick_at()
        if due is None or (self._timer is not None and self._timer_due_at <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_at = due
        delay = max(due - self.clock(), _MIN_TIMER_SECONDS)
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.apply_effects(self.brain.tick(self.clock()))
