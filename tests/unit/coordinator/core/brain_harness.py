"""A brain without a shell: the test turns its clock and sends reports, and every effect is
recorded."""

from typing import Any, TypeVar

from baton.cluster_link.messages import (
    AttemptFailed,
    BlocksReserved,
    DecodeOrder,
    HandoffCompleted,
    Heartbeat,
    NodeOrder,
    NodeReport,
    PrefillEnded,
    PrefillOrder,
    PromptLogprobsReport,
    StepTokens,
)
from baton.cluster_link.report_types import HandoffReport, NodeStats
from baton.errors import BatonError, Cancelled, NodeLost
from baton.pb.cluster_pb2 import ExplainResponse
from baton.types import (
    DEFAULT_PRINCIPAL,
    AttemptKey,
    FinishReason,
    Incarnation,
    Principal,
    Request,
    RequestId,
    Role,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from coordinator.core.brain import Brain
from coordinator.core.common.effects import (
    Effect,
    EmitPromptLogprobs,
    EmitTokens,
    EndRequest,
    SendOrder,
)
from coordinator.core.common.settings import BrainSettings
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.interface import PlacementPolicy
from coordinator.core.placement.policies import LeastLoadedPolicy
from coordinator.explanation_codec import EXPLANATION_PACKING, explanation_to_pb
from simulator.node_messages import SMALL_LAYOUT, make_join_info, make_ticket

LAYOUT = SMALL_LAYOUT
SILENCE, STALL = 5.0, 15.0
PREFILL, DECODE = Role.PREFILL, Role.DECODE
OrderT = TypeVar("OrderT", bound=NodeOrder)


def make_stats(room: int = 32, **fields: Any) -> NodeStats:
    return NodeStats(**{"blocks_total": 32, "blocks_free": room} | fields)


class BrainHarness:
    def __init__(
        self,
        mode: str = "disaggregated",
        max_queue: int = 8,
        max_attempts: int = 3,
        explain_keep: int = 16,
        placement: PlacementPolicy | None = None,
        prefill_share: float = 0.0,
        degraded_max_tokens: int = 0,
        max_queue_tokens: int = 2**23,
    ) -> None:
        settings = BrainSettings(
            mode=mode,  # type: ignore[arg-type]
            max_queue=max_queue,
            max_attempts=max_attempts,
            reserve_timeout=STALL,
            explain_keep=explain_keep,
            explanation_packing=EXPLANATION_PACKING,
            local_prefill_share=prefill_share,
            degraded_max_tokens=degraded_max_tokens,
            max_queue_tokens=max_queue_tokens,
        )
        self.brain = Brain(NodeRegistry(SILENCE, STALL), placement or LeastLoadedPolicy(), settings)
        self.now = 100.0
        self.effects: list[Effect] = []
        self._joins = 0
        self._requests = 0

    # inputs; each returns what it brought about, and `effects` keeps all of it

    def join_node(self, name: str, role: Role, **changes: Any) -> Incarnation:
        self._joins += 1
        incarnation = Incarnation(f"{name}#{self._joins}")
        self._record_effects(
            self.brain.join_node(make_join_info(name, role, **changes), incarnation, self.now)
        )
        return incarnation

    def submit(
        self,
        prompt: int = 20,
        max_tokens: int = 4,
        timeout: float = 60.0,
        *,
        internal: bool = False,
        **fields: Any,
    ) -> RequestId:
        """`after`, `choice` and `cache_salt` among `fields`; the others are sampling parameters."""
        request = self.make_request(prompt, max_tokens, timeout, **fields)
        self._record_effects(self.brain.submit_requests([request], self.now, internal=internal))
        return request.id

    def submit_all(self, *requests: Request) -> None:
        self._record_effects(self.brain.submit_requests(requests, self.now))

    def make_request(
        self,
        prompt: int = 20,
        max_tokens: int = 4,
        timeout: float = 60.0,
        *,
        after: RequestId | None = None,
        choice: int = 0,
        cache_salt: bytes = b"",
        standing: Principal = DEFAULT_PRINCIPAL,
        **sampling: Any,
    ) -> Request:
        self._requests += 1
        return Request(
            id=RequestId(f"r{self._requests}"),
            prompt_token_ids=tuple(range(1, prompt + 1)),
            sampling=SamplingParams(max_tokens, **sampling),
            timeout_seconds=timeout,
            cache_salt=cache_salt,
            choice_index=choice,
            principal=standing,
            leader_id=after,
        )

    def send_from_node(self, node: Incarnation, message: NodeReport) -> list[Effect]:
        return self._record_effects(self.brain.receive_report(node, message, self.now))

    def send_heartbeat(self, node: Incarnation, room: int = 32, **fields: Any) -> list[Effect]:
        return self.send_from_node(node, Heartbeat(make_stats(room, **fields)))

    def lose_node(self, node: Incarnation) -> list[Effect]:
        return self._record_effects(
            self.brain.remove_member(node, NodeLost(f"{node} died"), self.now)
        )

    def cancel(self, request: RequestId, error: BatonError | None = None) -> list[Effect]:
        return self._record_effects(
            self.brain.cancel_request(request, error or Cancelled("by the test"), self.now)
        )

    def stop(self, request: RequestId) -> list[Effect]:
        return self._record_effects(self.brain.stop_request(request, self.now))

    def advance(self, seconds: float, *, beating: bool = True) -> list[Effect]:
        """Turn the clock; with `beating`, nodes are heard just before."""
        self.now += seconds
        if beating:
            for node in self.brain.node_registry.nodes.values():
                node.heard_at = self.now
        return self._record_effects(self.brain.tick(self.now))

    def explain_request(self, request: RequestId) -> ExplainResponse:
        """As operators see it."""
        return explanation_to_pb(self.brain.explain_request(request, self.now))

    # what nodes say, in short

    def report_reserved(
        self, node: Incarnation, key: AttemptKey, writer: Incarnation | None
    ) -> list[Effect]:
        ticket = make_ticket(node, key, writer) if writer is not None else None
        return self.send_from_node(node, BlocksReserved(key, ticket, 0))

    def report_token(
        self,
        node: Incarnation,
        key: AttemptKey,
        index: int,
        token: int = 7,
        finish: FinishReason | None = None,
        score: TokenLogprobs | None = None,
    ) -> list[Effect]:
        return self.send_from_node(
            node, StepTokens((TokenEvent(key, index, token, finish, score),))
        )

    def report_prompt_logprobs(
        self, node: Incarnation, key: AttemptKey, first: int, *scores: TokenLogprobs
    ) -> list[Effect]:
        return self.send_from_node(node, PromptLogprobsReport(key, first, scores))

    def report_prefill_ended(
        self, node: Incarnation, key: AttemptKey, computed: int = 20, cached: int = 0
    ) -> None:
        self.send_from_node(node, PrefillEnded(key, computed, cached))

    def report_handed_off(self, node: Incarnation, key: AttemptKey) -> list[Effect]:
        return self.send_from_node(
            node, HandoffCompleted(key, HandoffReport(transport="shm", bytes=10))
        )

    def report_failure(self, node: Incarnation, key: AttemptKey, error: BatonError) -> list[Effect]:
        return self.send_from_node(node, AttemptFailed(key, error))

    # what came of it

    def messages_to(self, node: Incarnation, kind: type[OrderT]) -> list[OrderT]:
        return [
            effect.order
            for effect in self.effects
            if isinstance(effect, SendOrder)
            and effect.incarnation == node
            and isinstance(effect.order, kind)
        ]

    def last_attempt_key(self, node: Incarnation) -> AttemptKey:
        """Of the last attempt placed there."""
        placed = [
            effect.order.work.key
            for effect in self.effects
            if isinstance(effect, SendOrder)
            and effect.incarnation == node
            and isinstance(effect.order, DecodeOrder | PrefillOrder)
        ]
        return placed[-1]

    def emitted_tokens(self, request: RequestId) -> list[int]:
        return [
            token
            for effect in self.effects
            if isinstance(effect, EmitTokens) and effect.request_id == request
            for token in effect.token_ids
        ]

    def client_events(self, request: RequestId) -> list[EmitTokens | EmitPromptLogprobs]:
        """What its client was sent, in order."""
        sent = [
            effect for effect in self.effects if isinstance(effect, EmitTokens | EmitPromptLogprobs)
        ]
        return [effect for effect in sent if effect.request_id == request]

    def end_events(self, request: RequestId) -> list[EndRequest]:
        return [
            effect
            for effect in self.effects
            if isinstance(effect, EndRequest) and effect.request_id == request
        ]

    def end_event(self, request: RequestId) -> EndRequest:
        (end,) = self.end_events(request)
        return end

    def end_error(self, request: RequestId) -> BatonError:
        result = self.end_event(request).result
        assert isinstance(result, BatonError)
        return result

    def count_placed(self) -> int:
        return sum(self.brain.count_attempts(node) for node in self.brain.node_registry.nodes)

    def _record_effects(self, effects: list[Effect]) -> list[Effect]:
        self.effects += effects
        return effects


def stream_first_token(
    world: BrainHarness, prefill: Incarnation, decode: Incarnation
) -> AttemptKey:
    key = world.last_attempt_key(decode)
    world.report_reserved(decode, key, prefill)
    world.report_prefill_ended(prefill, key)
    world.report_token(decode, key, 0)
    return key
