"""Reports of the node link to protobuf and back."""

from collections.abc import Callable
from typing import Any, assert_never

from baton.cluster_link import pb_conversion as wire
from baton.cluster_link.messages import (
    AttemptFailed,
    AttemptReport,
    BlocksReserved,
    CacheEvents,
    CacheSnapshot,
    DecodeStarted,
    HandoffCompleted,
    Heartbeat,
    LedgerReport,
    NodeLeaving,
    NodeReport,
    PrefillEnded,
    PromptLogprobsReport,
    ReservationRefused,
    StepTokens,
)
from baton.cluster_link.order_codec import (
    attempt_key_from_pb,
    attempt_key_to_pb,
    ticket_from_pb,
    ticket_to_pb,
)
from baton.cluster_link.report_types import VerifiedDraft
from baton.cluster_link.stats_conversion import stats_from_pb, stats_to_pb
from baton.pb import cluster_pb2 as pb
from baton.pb import common_pb2
from baton.types import Incarnation, TokenEvent


def encode_report(report: NodeReport | LedgerReport, sender: Incarnation) -> pb.NodeMessage:
    message = pb.NodeMessage(incarnation=sender)
    match report:
        case StepTokens(events, drafts):
            message.tokens.tokens.extend(map(token_event_to_pb, events))
            message.tokens.drafts.extend(map(_encode_draft, drafts))
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
    key = attempt_key_to_pb(report.key)
    match report:
        case BlocksReserved(_, ticket, held_tokens):
            reserved = pb.Reserved(key=key, held_tokens=held_tokens)
            if ticket is not None:
                reserved.ticket.CopyFrom(ticket_to_pb(ticket))
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
    ticket = ticket_from_pb(message.ticket) if message.HasField("ticket") else None
    return BlocksReserved(attempt_key_from_pb(message.key), ticket, message.held_tokens)


def _decode_prefill_ended(message: pb.PrefillEnded) -> PrefillEnded:
    return PrefillEnded(
        attempt_key_from_pb(message.key),
        message.computed_tokens,
        message.cached_tokens,
        wire.check_seconds(message.share_seconds),
        message.pooled_tokens,
        message.remote_tokens,
        wire.check_seconds(message.compute_seconds),
    )


def _decode_decode_started(message: pb.Admitted) -> DecodeStarted:
    return DecodeStarted(
        attempt_key_from_pb(message.key),
        message.computed_tokens,
        message.cached_tokens,
        message.received_tokens,
        wire.check_seconds(message.share_seconds),
        message.pooled_tokens,
        message.remote_tokens,
    )


def _decode_prompt_scores(message: pb.PromptScores) -> PromptLogprobsReport:
    return PromptLogprobsReport(
        attempt_key_from_pb(message.key),
        message.first,
        tuple(map(wire.logprobs_from_pb, message.scores)),
    )


def token_event_to_pb(event: TokenEvent) -> pb.Token:
    finish = (
        wire.FINISH_REASON_TO_PB[event.finish_reason]
        if event.finish_reason
        else common_pb2.FINISH_REASON_UNSPECIFIED
    )
    return pb.Token(
        key=attempt_key_to_pb(event.key),
        index=event.output_index,
        token=event.token_id,
        finish=finish,
        score=wire.logprobs_to_pb(event.logprobs) if event.logprobs else None,
    )


def token_event_from_pb(message: pb.Token) -> TokenEvent:
    return TokenEvent(
        key=attempt_key_from_pb(message.key),
        output_index=message.index,
        token_id=message.token,
        finish_reason=wire.FINISH_REASON_FROM_PB.get(message.finish),
        logprobs=wire.logprobs_from_pb(message.score) if message.HasField("score") else None,
    )


def _encode_draft(draft: VerifiedDraft) -> pb.VerifiedDraft:
    return pb.VerifiedDraft(
        key=attempt_key_to_pb(draft.key), tokens=draft.num_tokens, accepted=draft.num_accepted
    )


def _decode_step_tokens(message: pb.Tokens) -> StepTokens:
    return StepTokens(
        tuple(map(token_event_from_pb, message.tokens)),
        tuple(
            VerifiedDraft(attempt_key_from_pb(draft.key), draft.tokens, draft.accepted)
            for draft in message.drafts
        ),
    )


_REPORT_DECODERS: dict[str, Callable[[Any], NodeReport | LedgerReport]] = {
    "heartbeat": lambda message: Heartbeat(stats_from_pb(message.stats)),
    "reserved": _decode_reserved,
    "refused": lambda message: ReservationRefused(
        attempt_key_from_pb(message.key), message.needed, message.free
    ),
    "prompt_scores": _decode_prompt_scores,
    "tokens": _decode_step_tokens,
    "failed": lambda message: AttemptFailed(
        attempt_key_from_pb(message.key),
        wire.error_from_pb(message.error),
        message.caused_by,
    ),
    "prefill_ended": _decode_prefill_ended,
    "handed_off": lambda message: HandoffCompleted(
        attempt_key_from_pb(message.key), wire.handoff_report_from_pb(message.report)
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
