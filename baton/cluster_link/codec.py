"""Messages of the node link to protobuf and back: both directions of each message.

`baton/cluster_link/pb_conversion.py` converts the types that the messages carry.
"""

from collections.abc import Callable
from typing import Any, assert_never

from baton.cluster_link import pb_conversion as wire
from baton.cluster_link.messages import (
    ArmFailpoints,
    AttemptFailed,
    AttemptReport,
    BlocksReserved,
    CacheEvents,
    CacheSnapshot,
    CacheSnapshotRequest,
    CancelOrder,
    DecodeOrder,
    DecodeStarted,
    HandoffCompleted,
    Heartbeat,
    JoinRefusal,
    LedgerQuery,
    LedgerReport,
    LinkControl,
    NodeLeaving,
    NodeOrder,
    NodeReport,
    PeerLostNotice,
    Ping,
    PrefillEnded,
    PrefillOrder,
    PromptLogprobsReport,
    ReservationRefused,
    SetRoleOrder,
    StepTokens,
    TicketOrder,
    Welcome,
)
from baton.cluster_link.stats_conversion import stats_from_pb, stats_to_pb
from baton.kv.pool_types import RemotePrefix
from baton.pb import cluster_pb2 as pb
from baton.types import Incarnation, Role


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


def encode_report(report: NodeReport | LedgerReport, sender: Incarnation) -> pb.NodeMessage:
    message = pb.NodeMessage(incarnation=sender)
    match report:
        case StepTokens(events):
            message.tokens.tokens.extend(map(wire.token_event_to_pb, events))
        case Heartbeat(stats):
            message.heartbeat.stats.CopyFrom(stats_to_pb(stats))
        case CacheEvents(number, inserted, evicted):
            message.cache_events.sequence = number
            message.cache_events.inserted.extend(inserted)
            message.cache_events.evicted.extend(evicted)
        case CacheSnapshot(number, hashes):
            message.cache_snapshot.sequence = number
            message.cache_snapshot.names.extend(hashes)
        case NodeLeaving(reason):
            message.leaving.reason = reason
        case LedgerReport(query_id, ledger, disk):
            reply = pb.LedgerReply(query=query_id, ledger=wire.ledger_to_pb(ledger))
            if disk is not None:
                reply.disk.CopyFrom(wire.ledger_to_pb(disk))
            message.ledger.CopyFrom(reply)
        case _:
            _encode_attempt_report(report, message)
    return message


def _encode_attempt_report(report: AttemptReport, message: pb.NodeMessage) -> None:
    key = wire.attempt_key_to_pb(report.key)
    match report:
        case BlocksReserved(_, ticket, held_tokens):
            reserved = pb.Reserved(key=key, held_tokens=held_tokens)
            if ticket is not None:
                reserved.ticket.CopyFrom(wire.ticket_to_pb(ticket))
            message.reserved.CopyFrom(reserved)
        case ReservationRefused(_, needed, free):
            message.refused.CopyFrom(pb.Refused(key=key, needed=needed, free=free))
        case PromptLogprobsReport(_, first, logprobs):
            scores = [wire.logprobs_to_pb(entry) for entry in logprobs]
            message.prompt_scores.CopyFrom(pb.PromptScores(key=key, first=first, scores=scores))
        case AttemptFailed(_, error, preempting_class):
            failed = pb.AttemptFailed(
                key=key, error=wire.error_to_pb(error), caused_by=preempting_class
            )
            message.failed.CopyFrom(failed)
        case PrefillEnded():
            message.prefill_ended.CopyFrom(_encode_prefill_ended(report, key))
        case HandoffCompleted(_, handoff):
            message.handed_off.CopyFrom(
                pb.HandedOff(key=key, report=wire.handoff_report_to_pb(handoff))
            )
        case DecodeStarted():
            message.admitted.CopyFrom(_encode_decode_started(report, key))
        case _:
            assert_never(report)


def _encode_prefill_ended(report: PrefillEnded, key: pb.AttemptKey) -> pb.PrefillEnded:
    return pb.PrefillEnded(
        key=key,
        computed_tokens=report.computed_tokens,
        cached_tokens=report.cached_tokens,
        compute_seconds=report.step_seconds,
        share_seconds=report.compute_seconds,
        pooled_tokens=report.pool_tokens,
        remote_tokens=report.remote_pool_tokens,
    )


def _encode_decode_started(report: DecodeStarted, key: pb.AttemptKey) -> pb.Admitted:
    return pb.Admitted(
        key=key,
        computed_tokens=report.computed_tokens,
        cached_tokens=report.cached_tokens,
        received_tokens=report.received_tokens,
        share_seconds=report.compute_seconds,
        pooled_tokens=report.pool_tokens,
        remote_tokens=report.remote_pool_tokens,
    )


def decode_report(message: pb.NodeMessage) -> NodeReport | LedgerReport | None:
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
        wire.check_seconds(message.share_seconds),
        message.pooled_tokens,
        message.remote_tokens,
        wire.check_seconds(message.compute_seconds),
    )


def _decode_decode_started(message: pb.Admitted) -> DecodeStarted:
    return DecodeStarted(
        wire.attempt_key_from_pb(message.key),
        message.computed_tokens,
        message.cached_tokens,
        message.received_tokens,
        wire.check_seconds(message.share_seconds),
        message.pooled_tokens,
        message.remote_tokens,
    )


def _decode_prompt_scores(message: pb.PromptScores) -> PromptLogprobsReport:
    return PromptLogprobsReport(
        wire.attempt_key_from_pb(message.key),
        message.first,
        tuple(map(wire.logprobs_from_pb, message.scores)),
    )


_REPORT_DECODERS: dict[str, Callable[[Any], NodeReport | LedgerReport]] = {
    "heartbeat": lambda message: Heartbeat(stats_from_pb(message.stats)),
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
        wire.attempt_key_from_pb(message.key), wire.handoff_report_from_pb(message.report)
    ),
    "admitted": _decode_decode_started,
    "cache_events": lambda message: CacheEvents(
        message.sequence, tuple(message.inserted), tuple(message.evicted)
    ),
    "cache_snapshot": lambda message: CacheSnapshot(message.sequence, tuple(message.names)),
    "leaving": lambda message: NodeLeaving(message.reason),
    "ledger": lambda message: LedgerReport(
        message.query,
        wire.ledger_from_pb(message.ledger),
        wire.ledger_from_pb(message.disk) if message.HasField("disk") else None,
    ),
}
