"""Translates the coordinator's messages to node commands; the only place that does."""

from baton.cluster_link import pb_conversion as wire
from baton.kv.pool_types import RemotePrefix
from baton.pb import cluster_pb2 as pb
from baton.pb.cluster_pb2 import CoordinatorMessage
from baton.types import Incarnation, Role
from node_engine.core import node_commands as commands


def command_from_pb(message: CoordinatorMessage) -> commands.NodeCommand | None:
    """The command in `message`; None if the message is not for nodes."""
    match message.WhichOneof("message"):
        case "submit":
            writer = (
                wire.peer_from_pb(message.submit.writer)
                if message.submit.HasField("writer")
                else None
            )
            share = max(0.0, message.submit.prefill_share)
            work = wire.attempt_spec_from_pb(message.submit.work)
            return commands.DecodeCommand(
                work, writer, share, remote_prefix=_remote_prefix_from_pb(message.submit)
            )
        case "prefill":
            work = wire.attempt_spec_from_pb(message.prefill.work)
            return commands.PrefillCommand(
                work, message.prefill.alone, remote_prefix=_remote_prefix_from_pb(message.prefill)
            )
        case "ticket":
            return commands.TicketCommand(wire.ticket_from_pb(message.ticket.ticket))
        case "cancel":
            return commands.CancelCommand(
                wire.attempt_key_from_pb(message.cancel.key),
                wire.error_from_pb(message.cancel.reason),
            )
        case "peer_gone":
            return commands.PeerLostCommand(Incarnation(message.peer_gone.incarnation))
        case "ledger_query":
            return commands.LedgerCommand(message.ledger_query.query)
        case "cache_query":
            return commands.CacheSnapshotCommand()
        case "set_role":
            return commands.SetRoleCommand(Role(message.set_role.role))
        case _:
            return None


def _remote_prefix_from_pb(message: pb.Submit | pb.Prefill) -> RemotePrefix | None:
    return wire.remote_prefix_from_pb(message.elsewhere) if message.HasField("elsewhere") else None
