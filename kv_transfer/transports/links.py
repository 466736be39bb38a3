"""What a transport provides: a message link between one writer and one decode node.

How the payload travels is a second, independent choice: inline in the message, or by one copy into
decode's mapped arena (shm_arena.py).

    transport  link     payload
    memory     memory   inline
    shm        zmq      mapped arena
    zmq        zmq      inline
    grpc       grpc     inline

All methods are called on the plane's own thread and never block. A link is ordered and may lose
everything after some point, which `get_loss` then reports. It never alters, repeats or reorders a
message.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.errors import BatonError

Pollable = Any  # a zmq socket or a file descriptor: what zmq.Poller.register takes


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
