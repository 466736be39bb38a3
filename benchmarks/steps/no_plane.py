"""The transfer plane of a node that computes all prompts itself."""

from baton.errors import BatonError
from baton.types import Incarnation, Ticket, TicketId


class NoInboundPlane:
    """An inbound plane that grants no tickets: what only a hand-off calls raises an error."""

    endpoint = ""

    def rejoin(self, incarnation: Incarnation) -> None: ...
    def on_peer_gone(self, writer: Incarnation) -> None: ...
    def close(self) -> None: ...

    def counters(self) -> dict[str, float]:
        return {}

    def choose_transport(self, writer_host_id: str, writer_endpoint: str | None = None) -> str:
        raise NotImplementedError

    def allocate_fence_byte(self) -> int:
        raise NotImplementedError

    def grant_ticket(self, ticket: Ticket) -> None:
        raise NotImplementedError

    def commit_ticket(self, ticket: TicketId) -> None:
        raise NotImplementedError

    def revoke_ticket(self, ticket: TicketId, error: BatonError) -> None:
        raise NotImplementedError
