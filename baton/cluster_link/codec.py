"""Messages of the node link to protobuf and back: both directions of each message.

`baton/cluster_link/pb_conversion.py` converts the types that the messages carry.
"""

from collections.abc import Callable
from typing import Any, assert_never

from baton.cluster_link import pb_conversion as wire
from baton.cluster_link.messages import (
    POOL_ROLE,
    ArmFailpoints,
    AttemptFailed,
    BlocksReserved,
    CacheEvents,
    CacheSnapshot,
    CacheSnapshotRequest,
    CancelOrder,
    DecodeOrder,
    DecodeStarted,
    HandoffCompleted,
    Heartbeat,
    JoinInfo,
    JoinRefusal,
    LedgerQuery,
    LinkControl,
    NodeLeaving,
    NodeOrder,
    NodeReport,
    PeerLostNotice,
    Ping,
    PoolJoinInfo,
    PrefillEnded,
    PrefillOrder,
    PromptLogprobsReport,
    ReservationRefused,
    SetRoleOrder,
    StepTokens,
    TicketOrder,
    Welcome,
)
from baton.errors import ConfigError
from baton.kv.pool_types import RemotePrefix
from baton.models.file_digests import ModelFileDigests
from baton.pb import cluster_pb2 as pb
from baton.types import Incarnation, NodeName, Role


def encode_join(join: JoinInfo | PoolJoinInfo) -> pb.NodeMessage:
    match join:
        case JoinInfo():
            return pb.NodeMessage(join=_encode_node_join(join))
        case PoolJoinInfo():
            return pb.NodeMessage(join=_encode_pool_join(join))
        case _:
            assert_never(join)


def _encode_node_join(join: JoinInfo) -> pb.Join:
    return pb.Join(
        protocol_version=join.protocol_version,
        name=join.name,
        role=join.role.value,
        host_id=join.host_id,
        transfer_endpoint=join.transfer_endpoint,
        pid=join.pid,
        model_digest=join.model_digest,
        layout=wire.layout_to_pb(join.layout),
        num_blocks=join.num_blocks,
        max_num_seqs=join.max_num_seqs,
        max_batched_tokens=join.max_batched_tokens,
        max_model_len=join.max_model_len,
        vocab_size=join.vocab_size,
        eos_token_ids=join.eos_token_ids,
        engine=join.engine,
        rejoining=join.rejoining,
        process=join.process,
        implementation=join.implementation,
        dtype=join.dtype,
        quantization=join.quantization,
        config_digest=join.files.config_digest,
        tokenizer_digest=join.files.tokenizer_digest,
        weights_digest=join.files.weights_digest,
    )


def _encode_pool_join(join: PoolJoinInfo) -> pb.Join:
    return pb.Join(
        protocol_version=join.protocol_version,
        name=join.name,
        role=POOL_ROLE,
        host_id=join.host_id,
        transfer_endpoint=join.endpoint,
        pid=join.pid,
        model_digest=join.model_digest,
        layout=wire.layout_to_pb(join.layout),
        num_blocks=join.num_blocks,
        rejoining=join.rejoining,
        process=join.process,
    )


def decode_join(join: pb.Join) -> JoinInfo | PoolJoinInfo:
    """Raises ConfigError for an unknown role."""
    if join.role == POOL_ROLE:
        return _decode_pool_join(join)
    try:
        role = Role(join.role)
    except ValueError:
        known = ", ".join((*(role.value for role in Role), POOL_ROLE))
        raise ConfigError(
            f"node {join.name!r} has role {join.role!r}: roles are {known}", param="role"
        ) from None
    return JoinInfo(
        protocol_version=join.protocol_version,
        name=NodeName(join.name),
        role=role,
        host_id=join.host_id,
        transfer_endpoint=join.transfer_endpoint,
        pid=join.pid,
        model_digest=join.model_digest,
        layout=wire.layout_from_pb(join.layout),
        num_blocks=join.num_blocks,
        max_num_seqs=join.max_num_seqs,
        max_batched_tokens=join.max_batched_tokens,
        max_model_len=join.max_model_len,
        vocab_size=join.vocab_size,
        eos_token_ids=tuple(join.eos_token_ids),
        engine=join.engine,
        rejoining=join.rejoining,
        process=join.process,
        implementation=join.implementation,
        dtype=join.dtype,
        quantization=join.quantization,
        files=ModelFileDigests(join.config_digest, join.tokenizer_digest, join.weights_digest),
    )


def _decode_pool_join(join: pb.Join) -> PoolJoinInfo:
    return PoolJoinInfo(
        protocol_version=join.protocol_version,
        name=NodeName(join.name),
        host_id=join.host_id,
        endpoint=join.transfer_endpoint,
        pid=join.pid,
        model_digest=join.model_digest,
        layout=wire.layout_from_pb(join.layout),
        num_blocks=join.num_blocks,
        process=join.process,
        rejoining=join.rejoining,
    )


def encode_order(order: NodeOrder | LinkControl) -> pb.CoordinatorMessage:
    match order:
        case DecodeOrder(spec, writer, share, remote_prefix):
            submit = pb.Submit(
                work=wire.attempt_spec_to_pb(spec),
                writer=wire.peer_to_pb(writer) if writer else None,
                prefill_share=share,
                elsewhere=wire.remote_prefix_to_pb(remote_prefix),
            )
            return pb.CoordinatorMessage(submit=submit)
        case PrefillOrder(spec, needs_no_decode, remote_prefix):
            prefill = pb.Prefill(
                work=wire.attempt_spec_to_pb(spec),
                alone=needs_no_decode,
                elsewhere=wire.remote_prefix_to_pb(remote_prefix),
            )
            return pb.CoordinatorMessage(prefill=prefill)
        case TicketOrder(ticket):
            return pb.CoordinatorMessage(ticket=pb.GiveTicket(ticket=wire.ticket_to_pb(ticket)))
        case CancelOrder(key, reason):
            cancel = pb.Cancel(key=wire.attempt_key_to_pb(key), reason=wire.error_to_pb(reason))
            return pb.CoordinatorMessage(cancel=cancel)
        case PeerLostNotice(incarnation):
            return pb.CoordinatorMessage(peer_gone=pb.PeerGone(incarnation=incarnation))
        case LedgerQuery(query_id):
            return pb.CoordinatorMessage(ledger_query=pb.LedgerQuery(query=query_id))
        case CacheSnapshotRequest():
            return pb.CoordinatorMessage(cache_query=pb.CacheQuery())
        case SetRoleOrder(role):
            return pb.CoordinatorMessage(set_role=pb.SetRole(role=role.value))
        case Welcome() | JoinRefusal() | Ping() | ArmFailpoints():
            return _encode_control(order)
        case _:
            assert_never(order)


def _encode_control(message: LinkControl) -> pb.CoordinatorMessage:
    match message:
        case Welcome(incarnation, heartbeat, silence):
            welcome = pb.Welcome(
                incarnation=incarnation, heartbeat_seconds=heartbeat, silence_seconds=silence
            )
            return pb.CoordinatorMessage(welcome=welcome)
        case JoinRefusal(error, retry):
            refusal = pb.Refusal(error=wire.error_to_pb(error), retry_seconds=retry)
            return pb.CoordinatorMessage(refusal=refusal)
        case Ping():
            return pb.CoordinatorMessage(ping=pb.Ping())
        case ArmFailpoints(spec):
            return pb.CoordinatorMessage(arm=pb.Arm(spec=spec))
        case _:
            assert_never(message)


def decode_order(message: pb.CoordinatorMessage) -> NodeOrder | LinkControl | None:
    """The order in `message`; None if there is none that this version knows.

    Raises ValueError if a field is out of its bounds.
    """
    match message.WhichOneof("message"):
        case "submit":
            submit = message.submit
            return DecodeOrder(
                wire.attempt_spec_from_pb(submit.work),
                wire.peer_from_pb(submit.writer) if submit.HasField("writer") else None,
                max(0.0, submit.prefill_share),
                _decode_remote_prefix(submit),
            )
        case "prefill":
            return PrefillOrder(
                wire.attempt_spec_from_pb(message.prefill.work),
                message.prefill.alone,
                _decode_remote_prefix(message.prefill),
            )
        case "ticket":
            return TicketOrder(wire.ticket_from_pb(message.ticket.ticket))
        case "cancel":
            return CancelOrder(
                wire.attempt_key_from_pb(message.cancel.key),
                wire.error_from_pb(message.cancel.reason),
            )
        case "peer_gone":
            return PeerLostNotice(Incarnation(message.peer_gone.incarnation))
        case "ledger_query":
            return LedgerQuery(message.ledger_query.query)
        case "cache_query":
            return CacheSnapshotRequest()
        case "set_role":
            return SetRoleOrder(Role(message.set_role.role))
        case _:
            return _decode_control(message)


def _decode_control(message: pb.CoordinatorMessage) -> LinkControl | None:
    match message.WhichOneof("message"):
        case "welcome":
            welcome = message.welcome
            return Welcome(
                Incarnation(welcome.incarnation), welcome.heartbeat_seconds, welcome.silence_seconds
            )
        case "refusal":
            refusal = message.refusal
            return JoinRefusal(wire.error_from_pb(refusal.error), refusal.retry_seconds)
        case "ping":
            return Ping()
        case "arm":
            return ArmFailpoints(message.arm.spec)
        case _:
            return None


def _decode_remote_prefix(message: pb.Submit | pb.Prefill) -> RemotePrefix | None:
    return wire.remote_prefix_from_pb(message.elsewhere) if message.HasField("elsewhere") else None


def decode_report(message: pb.NodeMessage) -> NodeReport | None:
    """The report in `message`; None if there is none that this version knows.

    Raises ValueError if a field is out of its bounds.
    """
    kind = message.WhichOneof("message")
    decode = _REPORT_DECODERS.get(kind) if kind else None
    return decode(getattr(message, kind)) if decode and kind else None


def _decode_reserved(message: pb.Reserved) -> BlocksReserved:
    ticket = wire.ticket_from_pb(message.ticket) if message.HasField("ticket") else None
    return BlocksReserved(wire.attempt_key_from_pb(message.key), ticket, message.held_tokens)


def _decode_prefill_ended(message: pb.PrefillEnded) -> PrefillEnded:
    return PrefillEnded(
        wire.attempt_key_from_pb(message.key),
        message.computed_tokens,
        message.cached_tokens,
        message.share_seconds,
        message.pooled_tokens,
        message.remote_tokens,
    )


def _decode_admitted(message: pb.Admitted) -> DecodeStarted:
    return DecodeStarted(
        wire.attempt_key_from_pb(message.key),
        message.computed_tokens,
        message.cached_tokens,
        message.received_tokens,
        message.share_seconds,
        message.pooled_tokens,
        message.remote_tokens,
    )


def _decode_prompt_scores(message: pb.PromptScores) -> PromptLogprobsReport:
    return PromptLogprobsReport(
        wire.attempt_key_from_pb(message.key),
        message.first,
        tuple(map(wire.logprobs_from_pb, message.scores)),
    )


_REPORT_DECODERS: dict[str, Callable[[Any], NodeReport]] = {
    "heartbeat": lambda message: Heartbeat(message.stats),
    "reserved": _decode_reserved,
    "refused": lambda message: ReservationRefused(
        wire.attempt_key_from_pb(message.key), message.needed, message.free
    ),
    "prompt_scores": _decode_prompt_scores,
    "tokens": lambda message: StepTokens(tuple(map(wire.token_event_from_pb, message.tokens))),
    "failed": lambda message: AttemptFailed(
        wire.attempt_key_from_pb(message.key),
        wire.error_from_pb(message.error),
        message.caused_by,
    ),
    "prefill_ended": _decode_prefill_ended,
    "handed_off": lambda message: HandoffCompleted(
        wire.attempt_key_from_pb(message.key), message.report
    ),
    "admitted": _decode_admitted,
    "cache_events": lambda message: CacheEvents(
        message.sequence, tuple(message.inserted), tuple(message.evicted)
    ),
    "cache_snapshot": lambda message: CacheSnapshot(message.sequence, tuple(message.names)),
    "leaving": lambda message: NodeLeaving(message.reason),
}
