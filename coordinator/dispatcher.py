"""The brain's shell: it carries out effects, keeps the one timer, and joins readers, nodes and brain on one event loop.

Nothing here decides anything.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from baton import log
from baton.clock import Clock, steady
from baton.config import Config
from baton.errors import BatonError, Cancelled, ConfigError, Draining, InvalidRequest, Rejected, SlowReader
from baton.limits import ModelBounds
from baton.pb.cluster_pb2 import CoordinatorMessage, ExplainResponse
from baton.ratio import Split
from baton.slo import Slo, parse_slo
from baton.types import Incarnation, NodeName, Request, RequestId, Standing, mint_id
from coordinator.core.brain import Brain
from coordinator.core.identity import CoordinatorModel, JoinInfo
from coordinator.core.messages import (
    Admit,
    Degraded,
    Effect,
    Emit,
    EmitPromptScores,
    End,
    Finished,
    Heartbeat,
    Leaving,
    Lost,
    NodeInput,
    PairChanged,
    Replaced,
    Send,
    Steered,
    Switched,
)
from coordinator.core.policies import POLICIES
from coordinator.core.pools import PoolInfo
from coordinator.core.reception import Arrival
from coordinator.core.registry import Registry
from coordinator.core.settings import Settings
from coordinator.core.tenants import OURS, Tenants
from coordinator.generation import Delta, Done, PromptScores, Submission
from coordinator.node_messages import order_to_pb, welcome
from coordinator.stream import MAX_UNREAD, Stream

_TIMER_GRAIN = 0.001  # seconds: event loops round to milliseconds

_log = log.get("dispatcher")


class Outbound(Protocol):
    """A node's stream as the dispatcher sees it."""

    def send(self, message: CoordinatorMessage) -> None:
        """Never blocks; a stream that cannot keep up closes itself."""
        ...

    def close(self) -> None:
        """The incarnation is no member any more: end the stream. Idempotent; calls nothing back."""
        ...


class Dispatcher:
    """A `Generator` for the front doors and the member list for the node link. One event loop, no locks."""

    def __init__(self, config: Config, clock: Clock = steady, served: CoordinatorModel | None = None) -> None:
        """`served`: what is known of the model, for nodes to be compared with. Raises ConfigError."""
        mode = config.mode if config.prefill else "colocated"
        settings = Settings(
            mode,
            config.max_queue,
            config.max_attempts,
            config.stall,
            config.explain_keep,
            config.retry_budget,
            config.local_prefill_share,
            config.degrade_wait,
            config.degraded_max_tokens,
            _objective(config.slo),
            config.max_queue_tokens,
        )
        self._config = config
        self.brain = Brain(Registry(config.silence, config.stall, served), POLICIES[config.placement](), settings)
        self.clock = clock
        self.mode = mode
        self.links: dict[Incarnation, Outbound] = {}
        self.on_end: list[Callable[[End], None]] = []
        self.on_change: list[Callable[[], None]] = []  # a node came, went, reported or switched
        self.on_switch: list[Callable[[Switched], None]] = []
        self._streams: dict[RequestId, Stream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._closing = False  # the ends of the nodes' streams are our own doing
        self._pending: deque[Effect] = deque()
        self._carrying = False
        self._idle = asyncio.Event()
        self._idle.set()
        if config.ratio_auto:
            self.brain.pilot.auto(None, config.flip_timeout, clock())

    # for the front doors

    def bounds(self) -> ModelBounds:
        return self.brain.bounds()

    async def submit(self, submission: Submission, *, internal: bool = False) -> Stream:
        """See `Generator.submit`. `internal` requests are counted in a class of their own."""
        (stream,) = await self.submit_all([submission], internal=internal)
        return stream

    async def submit_all(self, submissions: Sequence[Submission], *, internal: bool = False) -> list[Stream]:
        """See `Generator.submit_all`."""
        arrivals = _arrivals(submissions, internal=internal)
        effects = self.brain.submit_all(arrivals, self.clock(), internal=internal)
        streams = [Stream(arrival.request.id, self._client_gone, self._client_content) for arrival in arrivals]
        self._streams.update((stream.id, stream) for stream in streams)
        self._idle.clear()
        self._carry_out(effects)
        try:
            for stream in streams:
                await stream.admitted()
        except BaseException:  # cancelled, or one of them was not admitted: then none is
            for stream in streams:
                stream.cancel()
            raise
        return streams

    def require_admission(self, standing: Standing, count: int, timeout: float) -> None:
        """See `Generator.require_admission`."""
        self.brain.require_admission(standing, count, timeout, self.clock())

    def reload_tenants(self, tenants: Tenants) -> None:
        self._carry_out(self.brain.reload_tenants(tenants, self.clock()))

    def count_rejection(self, error: Rejected, tenant_class: str) -> None:
        """For what a front door refuses before it submits; `submit` counts its own."""
        self.brain.refuse(error, tenant_class, self.clock())

    async def drain(self, patience: float) -> None:
        """Refuse new requests, wait for those that run, and after `patience` seconds end the rest with Draining."""
        self.brain.drain()
        self._changed()
        try:
            async with asyncio.timeout(patience):
                await self._idle.wait()
        except TimeoutError:
            error = Draining(f"the cluster has stopped: {patience:g} s had passed (--drain-timeout)")
            for request in self.brain.active():
                self._cancel(request, error)

    # for operators

    def explain(self, request: RequestId) -> ExplainResponse:
        """Raises NotFound."""
        return self.brain.explain(request, self.clock())

    def drain_node(self, name: NodeName, timeout: float | None) -> None:
        """See `Brain.drain_node`."""
        self._carry_out(self.brain.drain_node(name, timeout, self.clock()))
        _log.info("node drained", node=name, timeout=timeout)
        self._changed()

    def undrain_node(self, name: NodeName) -> None:
        """See `Brain.undrain_node`."""
        self._carry_out(self.brain.undrain_node(name, self.clock()))
        _log.info("node back in service", node=name)
        self._changed()

    def set_ratio(self, target: Split, patience: float | None) -> None:
        """See `Brain.set_ratio`; without `patience`, --flip-timeout."""
        seconds = self._config.flip_timeout if patience is None else patience
        self._carry_out(self.brain.set_ratio(target, seconds, self.clock()))
        _log.info("ratio set", target=str(target), flip_timeout=seconds)
        self._changed()

    def auto_ratio(self, slo: Slo | None, patience: float | None) -> None:
        """See `Brain.auto_ratio`; without `patience`, --flip-timeout."""
        seconds = self._config.flip_timeout if patience is None else patience
        self._carry_out(self.brain.auto_ratio(slo, seconds, self.clock()))
        _log.info("ratio automatic", slo=str(self.brain.pilot.slo), flip_timeout=seconds)
        self._changed()

    def manual_ratio(self) -> None:
        self.brain.manual_ratio()
        _log.info("ratio manual")
        self._changed()

    def close(self) -> None:
        """Give up every node; nothing runs any more."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for link in list(self.links.values()):
            link.close()

    # for the node link

    def join(self, info: JoinInfo, link: Outbound) -> Incarnation:
        """A node becomes a member; its Welcome is the first thing it is sent. Raises ConfigError if it may not join."""
        incarnation = Incarnation(mint_id(64))
        effects = self.brain.join(info, incarnation, self.clock())
        self.links[incarnation] = link
        link.send(welcome(incarnation, self._config.heartbeat, self._config.silence))
        _log.info("node joined", node=info.name, role=info.role.value, incarnation=incarnation, pid=info.pid)
        self._carry_out(effects)
        self._changed()
        return incarnation

    def join_pool(self, info: PoolInfo, link: Outbound) -> Incarnation:
        """A host's pool becomes a member. Raises ConfigError if it may not."""
        incarnation = Incarnation(mint_id(64))
        effects = self.brain.join_pool(info, incarnation, self.clock())
        self.links[incarnation] = link
        link.send(welcome(incarnation, self._config.heartbeat, self._config.silence))
        _log.info("pool joined", node=info.name, incarnation=incarnation, pid=info.pid)
        self._carry_out(effects)
        self._changed()
        return incarnation

    def receive(self, sender: Incarnation, message: NodeInput) -> None:
        self._carry_out(self.brain.receive(sender, message, self.clock()))
        if isinstance(message, Heartbeat | Leaving):
            self._changed()

    def leave(self, incarnation: Incarnation, reason: BatonError) -> None:
        """The node's stream has ended. Idempotent."""
        self._carry_out(self.brain.node_gone(incarnation, reason, self.clock()))

    # inside

    def _client_gone(self, request: RequestId) -> None:
        self._cancel(request, Cancelled("the client has gone away"))

    def _client_content(self, request: RequestId) -> None:
        self._carry_out(self.brain.stop(request, self.clock()))

    def _cancel(self, request: RequestId, error: BatonError) -> None:
        self._carry_out(self.brain.cancel(request, error, self.clock()))

    def _carry_out(self, effects: list[Effect]) -> None:
        """In the order in which the brain decided them, also when carrying one out brings new ones."""
        self._pending.extend(effects)
        if self._carrying:
            return
        self._carrying = True
        try:
            while self._pending:
                self._carry_out_one(self._pending.popleft())
        finally:
            self._carrying = False
        self._arm()

    def _carry_out_one(self, effect: Effect) -> None:
        match effect:
            case Emit(request, tokens, scores):
                stream = self._streams.get(request)
                if stream is not None and not stream.push(Delta(tokens, scores)):
                    self._cancel(request, SlowReader(f"the client left more than {MAX_UNREAD} tokens unread"))
            case EmitPromptScores(request, scores):
                stream = self._streams.get(request)
                if stream is not None:
                    stream.push_prompt(PromptScores(scores))
            case Send(node, message):
                link = self.links.get(node)
                if link is not None:
                    link.send(order_to_pb(message))
            case Admit(request):
                stream = self._streams.get(request)
                if stream is not None:
                    stream.admit()
            case End():
                self._ended(effect)
            case Replaced(key, reason):
                _log.info("placed again", request=key.request, attempt=key.attempt, reason=reason)
            case Degraded(step, taken, pressure):
                _log.warning("service degraded" if taken else "service restored", step=step, pressure=pressure)
                self._changed()
            case PairChanged(prefill, decode, state):
                _log.warning("breaker", state=state.value, prefill=prefill, decode=decode)
            case Switched():
                self._switched(effect)
            case Steered(target, reason):
                _log.info("ratio changed", target=str(target), why=reason)
                self._changed()
            case Lost(node, name, error, expected):
                say, what = (_log.info, "node left to join anew") if expected else (_log.warning, "node lost")
                if self._closing:
                    say, what = _log.info, "node let go"
                say(what, node=name, incarnation=node, reason=error.message)
                link = self.links.pop(node, None)
                if link is not None:
                    link.close()
                self._changed()

    def _ended(self, end: End) -> None:
        stream, result, line = self._streams.pop(end.request, None), end.result, end.timeline
        if stream is not None:
            if isinstance(result, Finished):
                stream.end(Done(result.reason, result.cached_tokens, line), line)
            else:
                stream.end(result, line)
        if not self._streams:
            self._idle.set()
        for callback in self.on_end:
            callback(end)
        outcome = result.reason.value if isinstance(result, Finished) else result.code
        _log.info("request ended", request=end.request, outcome=outcome, attempts=line.attempts, seconds=line.total)

    def _switched(self, switch: Switched) -> None:
        seconds = {"drain": switch.drain, "switch": switch.switch, "probe": switch.probe}
        roles = f"{switch.source.value} to {switch.to.value}"
        _log.info("role switch", node=switch.node, roles=roles, outcome=switch.outcome, why=switch.detail, **seconds)
        for callback in self.on_switch:
            callback(switch)
        self._changed()

    def _changed(self) -> None:
        for callback in self.on_change:
            callback()

    def _arm(self) -> None:
        """One timer, for the next moment at which time alone changes something. One that rings early does no harm."""
        due = self.brain.next_due()
        if due is None or (self._timer is not None and self._timer_due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        delay = max(due - self.clock(), _TIMER_GRAIN)
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._carry_out(self.brain.tick(self.clock()))


def _objective(slo: str) -> Slo:
    """Raises ConfigError."""
    try:
        return parse_slo(slo)
    except InvalidRequest as error:
        raise ConfigError(f"--slo: {error.message}", param="slo") from None


def _arrivals(submissions: Sequence[Submission], *, internal: bool) -> list[Arrival]:
    """With ids, and those of one prompt one after another: see `Generator.submit_all`."""
    found: list[Arrival] = []
    leader: Request | None = None
    for submission in submissions:
        request = Request(
            id=RequestId(mint_id()),
            prompt=submission.prompt,
            sampling=submission.sampling,
            timeout=submission.timeout,
            cache_salt=submission.cache_salt,
            choice=submission.choice,
            standing=OURS if internal else submission.standing,
        )
        if leader is None or request.choice <= leader.choice or request.prompt != leader.prompt:
            leader = request
        found.append(Arrival(request, submission.after or (leader.id if leader is not request else None)))
    return found
