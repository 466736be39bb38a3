"""A writer's links to decode nodes, with what waits to be sent on each."""

from collections import deque
from collections.abc import Mapping, Sequence

from baton.types import Incarnation, TicketId
from kv_transfer.core import frames
from kv_transfer.transport import Dialer, Loss, Pollable, WriterLink

Peer = tuple[str, Incarnation]  # endpoint and incarnation: an address alone is no identity


class PeerLink:
    """Keeps messages in order when the link is full, and counts aborts that decode has not acknowledged yet."""

    def __init__(self, link: WriterLink, now: float) -> None:
        self.heard = now  # when decode last said anything on this link
        self._link = link
        self._waiting: deque[tuple[bytes, memoryview | None]] = deque()
        self.unacknowledged: set[TicketId] = set()

    @property
    def full(self) -> bool:
        """Whether taking more to be written makes no sense now."""
        return bool(self._waiting)

    def send(self, header: bytes, payload: memoryview | None = None) -> None:
        self._waiting.append((header, payload))
        self.flush()

    def flush(self) -> None:
        while self._waiting and self._link.send(*self._waiting[0]):
            self._waiting.popleft()

    def receive(self, now: float) -> frames.ToWriter | None:
        """The next frame, None when there is none now. Raises BadFrame."""
        header = self._link.receive()
        if header is None:
            return None
        self.heard = now
        frame = frames.decode_to_writer(header)
        if isinstance(frame, frames.Refused | frames.Committed):
            self.unacknowledged.discard(TicketId(frame.ticket))
        return frame

    def loss(self) -> Loss | None:
        return self._link.loss()

    def watched(self) -> Sequence[tuple[Pollable, bool]]:
        writable = self._link.writable() if self.full else None
        return [(pollable, pollable is writable) for pollable in self._link.readable()]

    def close(self) -> None:
        self._link.close()


class PeerLinks:
    """One link to each peer that there is something to say to."""

    def __init__(self, dialers: Mapping[str, Dialer]) -> None:
        """`dialers` by the scheme of the endpoints that they dial."""
        self._dialers = dialers
        self._links: dict[Peer, PeerLink] = {}

    def can_dial(self, endpoint: str) -> bool:
        return endpoint.partition("://")[0] in self._dialers

    def get(self, peer: Peer) -> PeerLink | None:
        """The link to a peer, if there is one."""
        return self._links.get(peer)

    def to(self, peer: Peer, now: float) -> PeerLink:
        """The link to a peer, dialled if there is none. Its endpoint is one that `can_dial`."""
        if peer not in self._links:
            endpoint = peer[0]
            self._links[peer] = PeerLink(self._dialers[endpoint.partition("://")[0]].dial(endpoint), now)
        return self._links[peer]

    def each(self) -> list[tuple[Peer, PeerLink]]:
        return list(self._links.items())

    def drop(self, peer: Peer) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.close()

    def watched(self) -> Sequence[tuple[Pollable, bool]]:
        return [watched for link in self._links.values() for watched in link.watched()]

    def acknowledged(self) -> bool:
        """Whether every abort that was sent has been answered."""
        return not any(link.unacknowledged for link in self._links.values())

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
        for dialer in self._dialers.values():
            dialer.close()
