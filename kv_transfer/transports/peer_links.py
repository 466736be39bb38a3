"""A writer's links to decode nodes, with the messages that wait on each."""

from collections import deque
from collections.abc import Mapping, Sequence

from baton.types import Incarnation, TicketId
from kv_transfer.core import frames
from kv_transfer.transports.links import LinkLoss, Pollable, TransferDialer, WriterLink

PeerKey = tuple[str, Incarnation]  # endpoint and incarnation: an address alone is no identity


class PeerLink:
    """One link. Messages wait in order while it is full; unanswered aborts are remembered."""

    def __init__(self, link: WriterLink, now: float) -> None:
        self.last_heard_at = now  # when decode last sent anything on this link
        self._link = link
        self._waiting: deque[tuple[bytes, memoryview | None]] = deque()
        self.unacked_aborts: set[TicketId] = set()

    @property
    def is_full(self) -> bool:
        """Whether messages are waiting, so that no more should be written now."""
        return bool(self._waiting)

    def send(self, header: bytes, payload: memoryview | None = None) -> None:
        self._waiting.append((header, payload))
        self.flush()

    def flush(self) -> None:
        """Send waiting messages as long as the link takes them."""
        while self._waiting and self._link.send(*self._waiting[0]):
            self._waiting.popleft()

    def receive(self, now: float) -> frames.FrameToWriter | None:
        """The next frame, None if there is none now. Raises BadFrame."""
        header = self._link.receive()
        if header is None:
            return None
        self.last_heard_at = now
        frame = frames.parse_frame_to_writer(header)
        if isinstance(frame, frames.RefusedFrame | frames.CommittedFrame):
            self.unacked_aborts.discard(TicketId(frame.ticket_id))
        return frame

    def get_loss(self) -> LinkLoss | None:
        return self._link.get_loss()

    def pollables(self) -> Sequence[tuple[Pollable, bool]]:
        writable = self._link.write_pollable() if self.is_full else None
        return [(pollable, pollable is writable) for pollable in self._link.read_pollables()]

    def close(self) -> None:
        self._link.close()


class PeerLinks:
    """The links of a writer, one for each peer that it has sent anything to."""

    def __init__(self, dialers: Mapping[str, TransferDialer]) -> None:
        """`dialers` by the scheme of the endpoints that they dial."""
        self._dialers = dialers
        self._links: dict[PeerKey, PeerLink] = {}

    def can_dial(self, endpoint: str) -> bool:
        return endpoint.partition("://")[0] in self._dialers

    def get(self, peer: PeerKey) -> PeerLink | None:
        """The link to a peer, if there is one."""
        return self._links.get(peer)

    def get_or_dial(self, peer: PeerKey, now: float) -> PeerLink:
        """The link to a peer, dialled if there is none. `can_dial` holds for its endpoint."""
        if peer not in self._links:
            endpoint = peer[0]
            self._links[peer] = PeerLink(
                self._dialers[endpoint.partition("://")[0]].dial(endpoint), now
            )
        return self._links[peer]

    def items(self) -> list[tuple[PeerKey, PeerLink]]:
        return list(self._links.items())

    def close_link(self, peer: PeerKey) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.close()

    def pollables(self) -> Sequence[tuple[Pollable, bool]]:
        return [pollable for link in self._links.values() for pollable in link.pollables()]

    def has_no_unacked_aborts(self) -> bool:
        """Whether every abort that was sent has been answered."""
        return not any(link.unacked_aborts for link in self._links.values())

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
        for dialer in self._dialers.values():
            dialer.close()
