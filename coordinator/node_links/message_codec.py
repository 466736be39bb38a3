"""Converts the brain's messages from and to protobuf."""

from collections.abc import Callable
from typing import Any

from baton.cluster_link import pb_conversion
from baton.errors import ConfigError
from baton.models.file_digests import ModelFileDigests
from baton.pb import cluster_pb2 as pb
from baton.types import Incarnation, NodeName, Role
from coordinator.core.common import messages as m
from coordinator.core.membership.join_checks import JoinInfo
from coordinator.core.membership.prefix_directory import POOL_ROLE, PoolJoinInfo


def join_from_pb(join: pb.Join) -> JoinInfo:
    """Raises ConfigError for an unknown role."""
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
        layout=pb_conversion.layout_from_pb(join.layout),
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


def pool_from_pb(join: pb.Join) -> PoolJoinInfo:
    return PoolJoinInfo(
        protocol_version=join.protocol_version,
        name=NodeName(join.name),
        host_id=join.host_id,
        endpoint=join.transfer_endpoint,
        pid=join.pid,
        model_digest=join.model_digest,
        layout=pb_conversion.layout_from_pb(join.layout),
        num_blocks=join.num_blocks,
        process=join.process,
    )


def _reserved_from_pb(message: pb.Reserved) -> m.BlocksReserved:
    ticket = pb_conversion.ticket_from_pb(message.ticket) if message.HasField("ticket") else None
    return m.BlocksReserved(
        pb_conversion.attempt_key_from_pb(message.key), ticket, message.held_tokens
    )


def _prefill_ended_from_pb(message: pb.PrefillEnded) -> m.PrefillEnded:
    return m.PrefillEnded(
        pb_conversion.attempt_key_from_pb(message.key),
        message.computed_tokens,
        message.cached_tokens,
        message.share_seconds,
        message.pooled_tokens,
        message.remote_tokens,
    )


def _admitted_from_pb(message: pb.Admitted) -> m.DecodeStarted:
    return m.DecodeStarted(
        pb_conversion.attempt_key_from_pb(message.key),
        message.computed_tokens,
        message.cached_tokens,
        message.received_tokens,
        message.share_seconds,
        message.pooled_tokens,
        message.remote_tokens,
    )


def _prompt_scores_from_pb(message: pb.PromptScores) -> m.PromptLogprobsReport:
    return m.PromptLogprobsReport(
        pb_conversion.attempt_key_from_pb(message.key),
        message.first,
        tuple(map(pb_conversion.logprobs_from_pb, message.scores)),
    )


_INPUT_CONVERTERS: dict[str, Callable[[Any], m.NodeReport]] = {
    "heartbeat": lambda message: m.Heartbeat(message.stats),
    "reserved": _reserved_from_pb,
    "refused": lambda message: m.ReservationRefused(
        pb_conversion.attempt_key_from_pb(message.key), message.needed, message.free
    ),
    "prompt_scores": _prompt_scores_from_pb,
    "tokens": lambda message: m.StepTokens(
        tuple(map(pb_conversion.token_event_from_pb, message.tokens))
    ),
    "failed": lambda message: m.AttemptFailed(
        pb_conversion.attempt_key_from_pb(message.key),
        pb_conversion.error_from_pb(message.error),
        message.caused_by,
    ),
    "prefill_ended": _prefill_ended_from_pb,
    "handed_off": lambda message: m.HandoffCompleted(
        pb_conversion.attempt_key_from_pb(message.key), message.report
    ),
    "admitted": _admitted_from_pb,
    "cache_events": lambda message: m.CacheEvents(
        message.sequence, tuple(message.inserted), tuple(message.evicted)
    ),
    "cache_snapshot": lambda message: m.CacheSnapshot(message.sequence, tuple(message.names)),
    "leaving": lambda message: m.NodeLeaving(message.reason),
}


def input_from_pb(message: pb.NodeMessage) -> m.NodeReport | None:
    """Return None for messages that are not for the brain.

    These are ledger replies, a second join, and kinds that this version does not know.
    """
    kind = message.WhichOneof("message")
    convert = _INPUT_CONVERTERS.get(kind) if kind else None
    return convert(getattr(message, kind)) if convert and kind else None


def order_to_pb(order: m.NodeOrder) -> pb.CoordinatorMessage:
    match order:
        case m.DecodeOrder(spec, writer, share, remote_prefix):
            submit = pb.Submit(
                work=pb_conversion.attempt_spec_to_pb(spec),
                writer=pb_conversion.peer_to_pb(writer) if writer else None,
                prefill_share=share,
                elsewhere=pb_conversion.remote_prefix_to_pb(remote_prefix),
            )
            return pb.CoordinatorMessage(submit=submit)
        case m.PrefillOrder(spec, alone, remote_prefix):
            prefill = pb.Prefill(
                work=pb_conversion.attempt_spec_to_pb(spec),
                alone=alone,
                elsewhere=pb_conversion.remote_prefix_to_pb(remote_prefix),
            )
            return pb.CoordinatorMessage(prefill=prefill)
        case m.TicketOrder(ticket):
            return pb.CoordinatorMessage(
                ticket=pb.GiveTicket(ticket=pb_conversion.ticket_to_pb(ticket))
            )
        case m.CancelOrder(key, reason):
            cancel = pb.Cancel(
                key=pb_conversion.attempt_key_to_pb(key), reason=pb_conversion.error_to_pb(reason)
            )
            return pb.CoordinatorMessage(cancel=cancel)
        case m.SetRoleOrder(role):
            return pb.CoordinatorMessage(set_role=pb.SetRole(role=role.value))
        case m.PeerLostNotice(incarnation):
            return pb.CoordinatorMessage(peer_gone=pb.PeerGone(incarnation=incarnation))
        case m.CacheSnapshotRequest():
            return pb.CoordinatorMessage(cache_query=pb.CacheQuery())


def build_welcome(
    incarnation: Incarnation, heartbeat: float, silence: float
) -> pb.CoordinatorMessage:
    fields = pb.Welcome(
        incarnation=incarnation, heartbeat_seconds=heartbeat, silence_seconds=silence
    )
    return pb.CoordinatorMessage(welcome=fields)
