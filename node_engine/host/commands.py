"""What the coordinator says, as the compute thread sees it. The only translator of its messages."""

from baton import wire
from baton.pb import cluster_pb2 as pb
from baton.pb.cluster_pb2 import CoordinatorMessage
from baton.pool_terms import Elsewhere
from baton.types import Incarnation, Role
from node_engine.core import messages


def command_from_pb(message: CoordinatorMessage) -> messages.Command | None:
    """None for what is no node's."""
    match message.WhichOneof("message"):
        case "submit":
            writer = wire.peer_from_pb(message.submit.writer) if message.submit.HasField("writer") else None
            share = max(0.0, message.submit.prefill_share)
            work = wire.work_from_pb(message.submit.work)
            return messages.Submit(work, writer, share, elsewhere=_elsewhere(message.submit))
        case "prefill":
            work = wire.work_from_pb(message.prefill.work)
            return messages.Prefill(work, message.prefill.alone, elsewhere=_elsewhere(message.prefill))
        case "ticket":
            return messages.GiveTicket(wire.ticket_from_pb(message.ticket.ticket))
        case "cancel":
            return messages.Cancel(wire.key_from_pb(message.cancel.key), wire.error_from_pb(message.cancel.reason))
        case "peer_gone":
            return messages.PeerGone(Incarnation(message.peer_gone.incarnation))
        case "ledger_query":
            return messages.LedgerQuery(message.ledger_query.query)
        case "cache_query":
            return messages.CacheQuery()
        case "set_role":
            return messages.SetRole(Role(message.set_role.role))
        case _:
            return None


def _elsewhere(order: pb.Submit | pb.Prefill) -> Elsewhere | None:
    return wire.elsewhere_from_pb(order.elsewhere) if order.HasField("elsewhere") else None
