"""Links between two planes of one process, made of bounded queues.

They are the reference that the contract tests hold the other transports to: no network, no other
process and no files.
"""

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.errors import PeerUnreachable
from kv_transfer.transports.links import EventFd, LinkLoss, LinkMessage, Pollable

_CAPACITY = 256  # messages per direction and link


@dataclass(eq=False)
class _MemoryPipe:
    """Both directions of one link. A deque's append and popleft are atomic."""

    to_decode: deque[tuple[bytes, bytes | None]] = field(default_factory=deque)
    to_writer: deque[bytes] = field(default_factory=deque)
    writer_wakeup: EventFd = field(default_factory=EventFd)
    is_writer_open: bool = True
    is_decode_open: bool = True


_listening: dict[str, "MemoryDecodeLink"] = {}
_lock = threading.Lock()  # guards _listening and every link's table of pipes


class MemoryDecodeLink:
    def __init__(self) -> None:
        self._endpoint = f"memory://{secrets.token_hex(8)}"
        self._pipes: dict[bytes, _MemoryPipe] = {}
        self.wakeup = EventFd()
        with _lock:
            _listening[self._endpoint] = self

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def accept_pipe(self, pipe: _MemoryPipe) -> None:
        """Register a writer's pipe. Called on the writer's thread, with `_lock` held."""
        self._pipes[secrets.token_bytes(8)] = pipe

    def receive(self) -> LinkMessage | None:
        self.wakeup.clear()
        with _lock:
            pipes = list(self._pipes.items())
        for route, pipe in pipes:
            if pipe.to_decode:
                header, payload = pipe.to_decode.popleft()
                self.wakeup.set()  # there may be more
                pipe.writer_wakeup.set()
                return LinkMessage(route, header, None if payload is None else memoryview(payload))
            if not pipe.is_writer_open:
                with _lock:
                    del self._pipes[route]
        return None

    def send(self, route: bytes, header: bytes) -> bool:
        with _lock:
            pipe = self._pipes.get(route)
        if pipe is None or len(pipe.to_writer) >= _CAPACITY:
            return False
        pipe.to_writer.append(header)
        pipe.writer_wakeup.set()
        return True

    def read_pollables(self) -> Sequence[Pollable]:
        return (self.wakeup.fd,)

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        with _lock:
            del _listening[self._endpoint]
            pipes = list(self._pipes.values())
        for pipe in pipes:
            pipe.is_decode_open = False
            pipe.writer_wakeup.set()
        self.wakeup.close()


class MemoryWriterLink:
    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._pipe = _MemoryPipe()
        with _lock:
            self._peer = _listening.get(endpoint)
            if self._peer is not None:
                self._peer.accept_pipe(self._pipe)

    def send(self, header: bytes, payload: memoryview | None = None) -> bool:
        if self._peer is None or len(self._pipe.to_decode) >= _CAPACITY:
            return False
        self._pipe.to_decode.append((header, None if payload is None else bytes(payload)))
        self._peer.wakeup.set()
        return True

    def receive(self) -> bytes | None:
        self._pipe.writer_wakeup.clear()
        try:
            header = self._pipe.to_writer.popleft()
        except IndexError:
            return None
        self._pipe.writer_wakeup.set()
        return header

    def get_loss(self) -> LinkLoss | None:
        if self._peer is not None and self._pipe.is_decode_open:
            return None
        return LinkLoss(
            PeerUnreachable(f"nothing listens at {self._endpoint}"), was_up=self._peer is not None
        )

    def read_pollables(self) -> Sequence[Pollable]:
        return (self._pipe.writer_wakeup.fd,)

    def write_pollable(self) -> Pollable | None:
        return None

    def close(self) -> None:
        self._pipe.is_writer_open = False
        self._pipe.writer_wakeup.close()
        if self._peer is not None:
            self._peer.wakeup.set()


class MemoryDialer:
    def dial(self, endpoint: str) -> MemoryWriterLink:
        return MemoryWriterLink(endpoint)

    def close(self) -> None:
        pass
