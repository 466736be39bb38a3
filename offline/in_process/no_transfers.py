"""The transfer plane of a node that has no peers: no ticket is ever granted."""

from baton.errors import BatonError
from baton.types import Incarnation, Ticket, TicketId


class NoTransfers:
    """An InboundPlane for a node that computes every prompt itself."""

    endpoint = ""

    def rejoin(self, incarnation: Incarnation) -> None:
        """There are no tickets to lose."""

    def choose_transport(self, writer_host_id: str, writer_endpoint: str | None = None) -> str:
        raise AssertionError("a node without peers has no KV writers")

    def allocate_fence_byte(self) -> int:
        raise AssertionError("a node without peers has no KV writers")

    def grant_ticket(self, ticket: Ticket) -> None:
        raise AssertionError("a node without peers has no KV writers")

    def commit_ticket(self, ticket: TicketId) -> None:
        raise AssertionError("a node without peers has no KV writers")

    def revoke_ticket(self, ticket: TicketId, error: BatonError) -> None:
        """There are no tickets to revoke."""

    def on_peer_gone(self, writer: Incarnation) -> None:
        """There are no peers."""

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """There is no thread to stop."""
