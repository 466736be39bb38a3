"""What the coordinator says, as the compute thread sees it. The only translator of its messages."""

from baton.cluster_link import pb_conversion as wire
from baton.kv.pool_types import RemotePrefix
from baton.pb import cluster_pb2 as pb
from baton.pb.cluster_pb2 import CoordinatorMessage
from baton.types import Incarnation, Role
from node_engine.core import node_commands as messages


def command_from_pb(message: CoordinatorMessage) -> messages.NodeCommand | None:
    """None for what is no node's."""
    match message.WhichOneof("message"):
        case "submit":
            writer = (
                wire.peer_from_pb(message.submit.writer)
                if message.submit.HasField("writer")
                else None
            )
            share = max(0.0, message.submit.prefill_share)
            work = wire.attempt_spec_from_pb(message.submit.work)
            return messages.DecodeCommand(
                work, writer, share, remote_prefix=_remote_prefix_from_pb(message.submit)
            )
        case "prefill":
            work = wire.attempt_spec_from_pb(message.prefill.work)
            return messages.PrefillCommand(
                work, message.prefill.alone, remote_prefix=_remote_prefix_from_pb(message.prefill)
            )
        case "ticket":
            return messages.TicketCommand(wire.ticket_from_pb(message.ticket.ticket))
        case "cancel":
            return messages.CancelCommand(
                wire.attempt_key_from_pb(message.cancel.key),
                wire.error_from_pb(message.cancel.reason),
            )
        case "peer_gone":
            return messages.PeerLostCommand(Incarnation(message.peer_gone.incarnation))
        case "ledger_query":
            return messages.LedgerCommand(message.ledger_query.query)
        case "cache_query":
            return messages.CacheSnapshotCommand()
        case "set_role":
            return messages.SetRoleCommand(Role(message.set_role.role))
        case _:
            return None


def _remote_prefix_from_pb(order: pb.Submit | pb.Prefill) -> RemotePrefix | None:
    return wire.remote_prefix_from_pb(order.elsewhere) if order.HasField("elsewhere") else None
