"""The brain on a bench: time turned by hand, nodes that say what the test says, and every effect recorded."""

from dataclasses import replace
from typing import Any

from baton.errors import BatonError, Cancelled, NodeGone
from baton.kv_layout import KVLayout
from baton.pb.cluster_pb2 import NodeStats
from baton.pb.common_pb2 import HandoffReport
from baton.types import (
    DEFAULT_STANDING,
    AttemptKey,
    FinishReason,
    Incarnation,
    NodeName,
    PeerAddress,
    Request,
    RequestId,
    Role,
    SamplingParams,
    SegmentRef,
    Standing,
    Ticket,
    TicketId,
    TokenEvent,
    TokenScore,
)
from baton.wire import PROTOCOL_VERSION
from coordinator.core import messages as m
from coordinator.core.brain import Brain
from coordinator.core.identity import JoinInfo
from coordinator.core.placement import Placement
from coordinator.core.reception import Arrival
from coordinator.core.registry import Registry
from coordinator.core.settings import Settings
from coordinator.core.simple_policies import LeastLoaded

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32")
SILENCE, STALL = 5.0, 15.0
PREFILL, DECODE = Role.PREFILL, Role.DECODE


def join_info(name: str, role: Role, **changes: Any) -> JoinInfo:
    info = JoinInfo(
        protocol_version=PROTOCOL_VERSION,
        name=NodeName(name),
        role=role,
        host_id="h",
        transfer_endpoint=f"tcp://{name}",
        pid=1,
        model_digest="ab",
        layout=LAYOUT,
        num_blocks=32,
        max_num_seqs=4,
        max_batched_tokens=64,
        max_model_len=256,
        vocab_size=1000,
        eos_token_ids=(2,),
        engine="paced",
        process=name,
        implementation="paced",
        dtype="float32",
    )
    return replace(info, **changes)


def stats(room: int = 32, **fields: Any) -> NodeStats:
    return NodeStats(blocks_total=32, blocks_free=room, **fields)


class World:
    def __init__(
        self,
        mode: str = "disaggregated",
        max_queue: int = 8,
        max_attempts: int = 3,
        explain_keep: int = 16,
        placement: Placement | None = None,
        prefill_share: float = 0.0,
        degraded_max_tokens: int = 0,
        max_queue_tokens: int = 2**23,
    ) -> None:
        settings = Settings(
            mode,  # type: ignore[arg-type]
            max_queue,
            max_attempts,
            STALL,
            explain_keep,
            prefill_share=prefill_share,
            degraded_max_tokens=degraded_max_tokens,
            max_queue_tokens=max_queue_tokens,
        )
        self.brain = Brain(Registry(SILENCE, STALL), placement or LeastLoaded(), settings)
        self.now = 100.0
        self.effects: list[m.Effect] = []
        self._joins = 0
        self._requests = 0

    # inputs; each returns what it brought about, and `effects` keeps all of it

    def join(self, name: str, role: Role, **changes: Any) -> Incarnation:
        self._joins += 1
        incarnation = Incarnation(f"{name}#{self._joins}")
        self._note(self.brain.join(join_info(name, role, **changes), incarnation, self.now))
        return incarnation

    def submit(
        self, prompt: int = 20, max_tokens: int = 4, timeout: float = 60.0, *, internal: bool = False, **fields: Any
    ) -> RequestId:
        """`after`, `choice` and `cache_salt` among `fields`; the others are sampling parameters."""
        arrival = self.arrival(prompt, max_tokens, timeout, **fields)
        self._note(self.brain.submit_all([arrival], self.now, internal=internal))
        return arrival.request.id

    def submit_all(self, *arrivals: Arrival) -> None:
        self._note(self.brain.submit_all(arrivals, self.now))

    def arrival(
        self,
        prompt: int = 20,
        max_tokens: int = 4,
        timeout: float = 60.0,
        *,
        after: RequestId | None = None,
        choice: int = 0,
        cache_salt: bytes = b"",
        standing: Standing = DEFAULT_STANDING,
        **sampling: Any,
    ) -> Arrival:
        self._requests += 1
        request = Request(
            id=RequestId(f"r{self._requests}"),
            prompt=tuple(range(1, prompt + 1)),
            sampling=SamplingParams(max_tokens, **sampling),
            timeout=timeout,
            cache_salt=cache_salt,
            choice=choice,
            standing=standing,
        )
        return Arrival(request, after)

    def say(self, node: Incarnation, message: m.NodeInput) -> list[m.Effect]:
        return self._note(self.brain.receive(node, message, self.now))

    def beat(self, node: Incarnation, room: int = 32, **fields: Any) -> list[m.Effect]:
        return self.say(node, m.Heartbeat(stats(room, **fields)))

    def gone(self, node: Incarnation) -> list[m.Effect]:
        return self._note(self.brain.node_gone(node, NodeGone(f"{node} died"), self.now))

    def cancel(self, request: RequestId, error: BatonError | None = None) -> list[m.Effect]:
        return self._note(self.brain.cancel(request, error or Cancelled("by the test"), self.now))

    def stop(self, request: RequestId) -> list[m.Effect]:
        return self._note(self.brain.stop(request, self.now))

    def advance(self, seconds: float, *, beating: bool = True) -> list[m.Effect]:
        """Turn the clock; with `beating`, nodes are heard just before."""
        self.now += seconds
        if beating:
            for node in self.brain.registry.nodes.values():
                node.heard_at = self.now
        return self._note(self.brain.tick(self.now))

    # what nodes say, in short

    def reserve(self, node: Incarnation, key: AttemptKey, writer: Incarnation | None) -> list[m.Effect]:
        ticket = ticket_for(node, key, writer) if writer is not None else None
        return self.say(node, m.Reserved(key, ticket, 0))

    def token(
        self,
        node: Incarnation,
        key: AttemptKey,
        index: int,
        token: int = 7,
        finish: FinishReason | None = None,
        score: TokenScore | None = None,
    ) -> list[m.Effect]:
        return self.say(node, m.Tokens((TokenEvent(key, index, token, finish, score),)))

    def prompt_scores(self, node: Incarnation, key: AttemptKey, first: int, *scores: TokenScore) -> list[m.Effect]:
        return self.say(node, m.PromptScores(key, first, scores))

    def prefill_ended(self, node: Incarnation, key: AttemptKey, computed: int = 20, cached: int = 0) -> None:
        self.say(node, m.PrefillEnded(key, computed, cached))

    def handed_off(self, node: Incarnation, key: AttemptKey) -> list[m.Effect]:
        return self.say(node, m.HandedOff(key, HandoffReport(transport="shm", bytes=10)))

    def fail(self, node: Incarnation, key: AttemptKey, error: BatonError) -> list[m.Effect]:
        return self.say(node, m.AttemptFailed(key, error))

    # what came of it

    def sent(self, node: Incarnation, kind: type[Any]) -> list[Any]:
        return [
            effect.message
            for effect in self.effects
            if isinstance(effect, m.Send) and effect.node == node and isinstance(effect.message, kind)
        ]

    def key(self, node: Incarnation) -> AttemptKey:
        """Of the last attempt placed there."""
        placed = [
            effect.message.work.key
            for effect in self.effects
            if isinstance(effect, m.Send) and effect.node == node and isinstance(effect.message, m.Submit | m.Prefill)
        ]
        return placed[-1]

    def tokens(self, request: RequestId) -> list[int]:
        return [
            token
            for effect in self.effects
            if isinstance(effect, m.Emit) and effect.request == request
            for token in effect.tokens
        ]

    def shown(self, request: RequestId) -> list[m.Emit | m.EmitPromptScores]:
        """What its client was sent, in order."""
        sent = [effect for effect in self.effects if isinstance(effect, m.Emit | m.EmitPromptScores)]
        return [effect for effect in sent if effect.request == request]

    def ends(self, request: RequestId) -> list[m.End]:
        return [effect for effect in self.effects if isinstance(effect, m.End) and effect.request == request]

    def end(self, request: RequestId) -> m.End:
        (end,) = self.ends(request)
        return end

    def error(self, request: RequestId) -> BatonError:
        result = self.end(request).result
        assert isinstance(result, BatonError)
        return result

    def placed(self) -> int:
        return sum(self.brain.placed_on(node) for node in self.brain.registry.nodes)

    def _note(self, effects: list[m.Effect]) -> list[m.Effect]:
        self.effects += effects
        return effects


def ticket_for(node: Incarnation, key: AttemptKey, writer: Incarnation) -> Ticket:
    return Ticket(
        id=TicketId(f"t-{key}"),
        key=key,
        decode=PeerAddress(NodeName("d"), node, "h", "tcp://d"),
        writer=writer,
        first_block=0,
        offsets=(0,),
        num_tokens=20,
        ttl=10.0,
        transport="shm",
        segment=SegmentRef("s", node),
        fence=1,
    )


def stream_one(world: World, prefill: Incarnation, decode: Incarnation) -> AttemptKey:
    key = world.key(decode)
    world.reserve(decode, key, prefill)
    world.prefill_ended(prefill, key)
    world.token(decode, key, 0)
    return key
