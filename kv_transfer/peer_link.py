"""One writer's link to one decode node, with what waits to be sent on it."""

from collections import deque
from collections.abc import Sequence

from baton.types import TicketId
from kv_transfer.core import frames
from kv_transfer.transport import Loss, Pollable, WriterLink


class PeerLink:
    """Keeps messages in order when the link is full, and counts aborts that decode has not acknowledged
    yet."""

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
