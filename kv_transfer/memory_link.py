"""The in-process twin of zmq_link: bounded queues between two planes of one process. Its purpose is to hold
the other backends to a reference that has no network, no other process and no files in it."""

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.errors import PeerGone
from kv_transfer.transport import Loss, Message, Pollable
from kv_transfer.wake import Wake

_CAPACITY = 256  # messages per direction and link


@dataclass(eq=False)
class _Pipe:
    """Both directions of one link. Appending to and popping from a deque are atomic."""

    to_decode: deque[tuple[bytes, bytes | None]] = field(default_factory=deque)
    to_writer: deque[bytes] = field(default_factory=deque)
    writer_wake: Wake = field(default_factory=Wake)
    writer_open: bool = True
    decode_open: bool = True


_listening: dict[str, "MemoryDecodeLink"] = {}
_lock = threading.Lock()  # guards _listening and every link's table of pipes


class MemoryDecodeLink:
    def __init__(self) -> None:
        self._endpoint = f"memory://{secrets.token_hex(8)}"
        self._pipes: dict[bytes, _Pipe] = {}
        self.wake = Wake()
        with _lock:
            _listening[self._endpoint] = self

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def accept(self, pipe: _Pipe) -> None:
        """Called by the writer's thread, with `_lock` held."""
        self._pipes[secrets.token_bytes(8)] = pipe

    def receive(self) -> Message | None:
        self.wake.clear()
        with _lock:
            pipes = list(self._pipes.items())
        for route, pipe in pipes:
            if pipe.to_decode:
                header, payload = pipe.to_decode.popleft()
                self.wake.set()  # there may be more
                pipe.writer_wake.set()
                return Message(route, header, None if payload is None else memoryview(payload))
            if not pipe.writer_open:
                with _lock:
                    del self._pipes[route]
        return None

    def send(self, route: bytes, header: bytes) -> bool:
        with _lock:
            pipe = self._pipes.get(route)
        if pipe is None or len(pipe.to_writer) >= _CAPACITY:
            return False
        pipe.to_writer.append(header)
        pipe.writer_wake.set()
        return True

    def readable(self) -> Sequence[Pollable]:
        return (self.wake.fd,)

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        with _lock:
            del _listening[self._endpoint]
            pipes = list(self._pipes.values())
        for pipe in pipes:
            pipe.decode_open = False
            pipe.writer_wake.set()
        self.wake.close()


class MemoryWriterLink:
    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._pipe = _Pipe()
        with _lock:
            self._peer = _listening.get(endpoint)
            if self._peer is not None:
                self._peer.accept(self._pipe)

    def send(self, header: bytes, payload: memoryview | None = None) -> bool:
        if self._peer is None or len(self._pipe.to_decode) >= _CAPACITY:
            return False
        self._pipe.to_decode.append((header, None if payload is None else bytes(payload)))
        self._peer.wake.set()
        return True

    def receive(self) -> bytes | None:
        self._pipe.writer_wake.clear()
        try:
            header = self._pipe.to_writer.popleft()
        except IndexError:
            return None
        self._pipe.writer_wake.set()
        return header

    def loss(self) -> Loss | None:
        if self._peer is not None and self._pipe.decode_open:
            return None
        return Loss(PeerGone(f"nothing listens at {self._endpoint}"), was_up=self._peer is not None)

    def readable(self) -> Sequence[Pollable]:
        return (self._pipe.writer_wake.fd,)

    def writable(self) -> Pollable | None:
        return None

    def close(self) -> None:
        self._pipe.writer_open = False
        self._pipe.writer_wake.close()
        if self._peer is not None:
            self._peer.wake.set()


class MemoryDialer:
    def dial(self, endpoint: str) -> MemoryWriterLink:
        return MemoryWriterLink(endpoint)

    def close(self) -> None:
        pass
