"""What a transport provides: a message link between one writer and one decode node.

How the payload travels is a second, independent choice: inline in the message, by one copy into
decode's mapped arena (shm_arena.py), or by the writer's device (kv_transfer/device).

    transport  link              payload
    memory     memory            inline
    shm        local, else zmq   mapped arena
    cuda_ipc   local, else zmq   device memory
    zmq        zmq               inline
    grpc       grpc              inline

All methods are called on the plane's own thread and never block. A link is ordered and may lose
everything after some point, which `get_loss` then reports. It never alters, repeats or reorders a
message.

A writer's links to decode nodes, with the messages that wait on each.
"""

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.errors import BatonError, PeerUnreachable
from baton.types import Incarnation, Ticket, TicketId
from kv_transfer.core import frames
from kv_transfer.core.handoff_common import is_one_sided

Pollable = Any  # a zmq socket or a file descriptor: what zmq.Poller.register takes


class EventFd:
    """Wakes a thread that polls; any thread may set it at any time, even after `close`.

    One thread polls `fd` and clears it.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_open = True

    def set(self) -> None:
        with self._lock:
            if self._is_open:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self.fd)


@dataclass(frozen=True, slots=True)
class LinkMessage:
    """A message as decode receives it."""

    reply_route: bytes  # the link that answers go back on
    header: bytes
    payload: memoryview | None


@dataclass(frozen=True, slots=True)
class LinkLoss:
    """Why a link is lost."""

    error: BatonError
    was_up: bool  # whether the peer had ever answered on it


class WriterLink(Protocol):
    """The writer's end: a link to one decode node."""

    def send(self, header: bytes, payload: memoryview | None = None) -> bool:
        """Queue a message. False when the link is full: try again when it is writable.

        The payload must not change afterwards."""
        ...

    def receive(self) -> bytes | None:
        """The next message, None if there is none now."""
        ...

    def get_loss(self) -> LinkLoss | None:
        """Why the link is lost, None while it is not. A lost link does not recover."""
        ...

    def read_pollables(self) -> Sequence[Pollable]: ...
    def write_pollable(self) -> Pollable | None:
        """What to poll for room after `send` returned False; None: `read_pollables` covers it."""
        ...

    def close(self) -> None: ...


class DecodeLink(Protocol):
    """Decode's end: one listening endpoint, many writers."""

    @property
    def endpoint(self) -> str: ...

    def receive(self) -> LinkMessage | None:
        """The next message of any writer, None if there is none now."""
        ...

    def send(self, route: bytes, header: bytes) -> bool:
        """Answer a writer. False when it is gone or does not read: the message is lost.

        The hand-off then ends by its time-outs."""
        ...

    def read_pollables(self) -> Sequence[Pollable]: ...
    def counters(self) -> dict[str, float]: ...
    def close(self) -> None: ...


class TransferDialer(Protocol):
    """Makes links to endpoints of one transport."""

    def dial(self, endpoint: str) -> WriterLink: ...
    def close(self) -> None: ...


class LocalLinkDialer(TransferDialer, Protocol):
    """Makes links to decode nodes whose segment folder this process sees."""

    def find_endpoint(self, segment: str) -> str:
        """The endpoint of the link beside a segment; empty if there is none that can be used."""
        ...

    def can_dial(self, endpoint: str) -> bool:
        """Dial an endpoint that was found, for the next `dial`. Whether that was possible."""
        ...


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

    def __init__(
        self,
        dialers: Mapping[str, TransferDialer],
        local_dialer: LocalLinkDialer | None = None,
    ) -> None:
        """`dialers` by the scheme of the endpoints that they dial, which tickets name."""
        self._dialers = dialers
        self._local_dialer = local_dialer
        self._links: dict[PeerKey, PeerLink] = {}

    def choose_endpoint(self, ticket: Ticket) -> str:
        """What to dial for a ticket: the link beside decode's segment, if it is written to.

        Raises PeerUnreachable if nothing dials the endpoint that the ticket names.
        """
        if is_one_sided(ticket.transport) and (local := self._find_local_endpoint(ticket)):
            return local
        endpoint = ticket.decode_peer.transfer_endpoint
        if _scheme(endpoint) not in self._dialers:
            raise PeerUnreachable(f"no transport dials {endpoint[:200]!r}")
        return endpoint

    def _find_local_endpoint(self, ticket: Ticket) -> str:
        dialer = self._local_dialer
        endpoint = dialer.find_endpoint(ticket.segment.name) if dialer is not None else ""
        if not endpoint or dialer is None:
            return ""
        is_linked = (endpoint, ticket.decode_peer.incarnation) in self._links
        return endpoint if is_linked or dialer.can_dial(endpoint) else ""

    def get(self, peer: PeerKey) -> PeerLink | None:
        """The link to a peer, if there is one."""
        return self._links.get(peer)

    def get_or_dial(self, peer: PeerKey, now: float) -> PeerLink:
        """The link to a peer, dialled if there is none. Its endpoint was chosen here."""
        if peer not in self._links:
            self._links[peer] = PeerLink(self._dial(peer[0]), now)
        return self._links[peer]

    def _dial(self, endpoint: str) -> WriterLink:
        dialer = self._dialers.get(_scheme(endpoint)) or self._local_dialer
        assert dialer is not None, endpoint
        return dialer.dial(endpoint)

    def items(self) -> list[tuple[PeerKey, PeerLink]]:
        return list(self._links.items())

    def close_link(self, peer: PeerKey) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.close()

    def pollables(self) -> Sequence[tuple[Pollable, bool]]:
        return [pollable for link in self._links.values() for pollable in link.pollables()]

    def has_no_unacked_aborts(self) -> bool:
        """Whether the peers have acknowledged every abort that was sent."""
        return not any(link.unacked_aborts for link in self._links.values())

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
        for dialer in self._dialers.values():
            dialer.close()
        if self._local_dialer is not None:
            self._local_dialer.close()


def _scheme(endpoint: str) -> str:
    return endpoint.partition("://")[0]
