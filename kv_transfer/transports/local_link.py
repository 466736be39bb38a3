"""Message links between processes of one user on one host: a Unix socket beside decode's segment.

Writers of one-sided transports use it, because they share the segment folder with decode anyway. A
message over zmq wakes two more threads, one in each process: zmq's own. Over a Unix socket a round
trip takes a sixth to a quarter of the time.

Only processes of this user can connect: the socket's file is private, and both ends check whose
process the other one is. Such a process can map the segment as well, so nothing is encrypted and
the cluster token is not asked for.

A message on the stream is its length in 4 bytes, little-endian, then the header. Payloads do not
travel here.
"""

import errno
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

from baton.errors import PeerUnreachable
from baton.shared_memory.segment import LINK_SUFFIX, SEGMENT_NAME
from kv_transfer.core.frames import MAX_HEADER_BYTES
from kv_transfer.core.message_framing import pack_message, split_messages
from kv_transfer.transports.links import DecodeLink, LinkLoss, LinkMessage, Pollable

LOCAL_SCHEME = "unix"
_MAX_CONNECTIONS = 256  # at decode: one for each writing process
_MAX_QUEUED_ANSWERS = 1 << 16  # of about 100 bytes, for one writer
_READ_BYTES = 1 << 16
_LOCAL, _NETWORK = b"l", b"n"  # the first byte of a route, which says on which link it is
_CREDENTIALS = struct.Struct("iII")  # pid, uid and gid: struct ucred


@contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Another path of the same file: a socket's address has room for 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _is_own_user(connected: socket.socket) -> bool:
    """Whether the other end is a process of this user."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _make_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)


class _MessageStream:
    """Messages over one connected socket, without blocking."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.loss = ""  # why the connection is lost, empty while it is not
        self._received = bytearray()
        self._messages: deque[bytes] = deque()
        self._num_sent = 0  # bytes of the message that is being sent

    def receive(self) -> bytes | None:
        """The next message, None if there is none now.

        What was received before the connection was lost is not lost.
        """
        if not self._messages and not self.loss:
            self._read()
        return self._messages.popleft() if self._messages else None

    def _read(self) -> None:
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.loss = error.strerror or "the connection was lost"
            return
        if not data:
            self.loss = "the connection was closed"
            return
        self._received += data
        try:
            self._messages += split_messages(self._received, MAX_HEADER_BYTES)
        except ValueError as error:
            self.loss = str(error)

    def try_send(self, message: bytes) -> bool:
        """Send a message. False if it is not sent completely, because there is no room now or the
        connection is lost: the next call must be for the same message.

        A loss shows when all is read that came before it.
        """
        while self._num_sent < len(message):
            try:
                self._num_sent += self.socket.send(memoryview(message)[self._num_sent :])
            except OSError:
                return False
        self._num_sent = 0
        return True


def _connect(path: Path) -> _MessageStream:
    """Raises OSError, also if the other end is a process of another user."""
    stream = _MessageStream(_make_socket())
    try:
        with _short_path(path) as address:
            stream.socket.connect(address)
        if not _is_own_user(stream.socket):
            raise PermissionError(errno.EPERM, "the process is another user's")
    except OSError:
        stream.socket.close()
        raise
    return stream


class LocalWriterLink:
    """The writer's end: implements WriterLink."""

    def __init__(self, path: Path, on_unusable: Callable[[], None] = lambda: None) -> None:
        """Connects at once; what fails is reported by `get_loss`.

        `on_unusable` is called if the link is lost before decode has answered on it.
        """
        self._path = path
        self._on_unusable = on_unusable
        self._is_up = False  # decode has answered
        self._stream: _MessageStream | None = None
        self._dial_error = ""
        self._fds: tuple[int, ...] = ()
        self._packed = b"", b""  # the header that is being sent, and its message
        try:
            self._stream = _connect(path)
        except OSError as error:
            self._dial_error = error.strerror or str(error)
        else:
            self._fds = (self._stream.socket.fileno(),)

    def send(self, header: bytes, payload: memoryview | None = None) -> bool:
        assert payload is None, "a payload over a local link"
        if self._packed[0] is not header:  # else this is the next try
            self._packed = header, pack_message(header, None)
        return self._stream is not None and self._stream.try_send(self._packed[1])

    def receive(self) -> bytes | None:
        message = None if self._stream is None else self._stream.receive()
        self._is_up |= message is not None
        return message

    def get_loss(self) -> LinkLoss | None:
        reason = self._dial_error if self._stream is None else self._stream.loss
        if not reason:
            return None
        if not self._is_up:
            self._on_unusable()
        error = PeerUnreachable(f"local transfer link {self._path.name}: {reason}")
        return LinkLoss(error, self._is_up)

    def read_pollables(self) -> Sequence[Pollable]:
        return self._fds

    def write_pollable(self) -> Pollable | None:
        return self._fds[0] if self._fds else None

    def close(self) -> None:
        if self._stream is not None:
            self._stream.socket.close()


class LocalDialer:
    """Makes LocalWriterLinks: implements LocalLinkDialer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unusable: set[str] = set()  # endpoints on which decode did not answer
        self._dialled: dict[str, LocalWriterLink] = {}  # that nobody uses yet, by endpoint

    def find_endpoint(self, segment: str) -> str:
        """The endpoint of a segment's link; empty if there is none that can be used."""
        path = self._folder / (segment + LINK_SUFFIX)
        if SEGMENT_NAME.fullmatch(segment) is None or not path.exists():
            return ""
        endpoint = f"{LOCAL_SCHEME}://{segment}"
        return "" if endpoint in self._unusable else endpoint

    def can_dial(self, endpoint: str) -> bool:
        """Dial an endpoint that was found, if it has not been. The link is kept for `dial`."""
        if endpoint in self._dialled:
            return True
        link = self._make_link(endpoint)
        if link.get_loss() is None:
            self._dialled[endpoint] = link
        return endpoint in self._dialled

    def dial(self, endpoint: str) -> LocalWriterLink:
        return self._dialled.pop(endpoint, None) or self._make_link(endpoint)

    def _make_link(self, endpoint: str) -> LocalWriterLink:
        segment = endpoint.removeprefix(f"{LOCAL_SCHEME}://")
        path = self._folder / (segment + LINK_SUFFIX)
        return LocalWriterLink(path, lambda: self._unusable.add(endpoint))

    def close(self) -> None:
        for link in self._dialled.values():
            link.close()
        self._dialled.clear()


class _WriterConnection:
    """Decode's end of one link, with the answers that wait for room."""

    def __init__(self, connected: socket.socket) -> None:
        self.stream = _MessageStream(connected)
        self.answers: deque[bytes] = deque()
        self.polls_for_room = False

    def flush(self) -> None:
        while self.answers and self.stream.try_send(self.answers[0]):
            self.answers.popleft()


class LocalDecodeLink:
    """Decode's end of its local links."""

    def __init__(self, segment_path: Path) -> None:
        """Raises OSError when there can be no socket beside the segment."""
        self._path = segment_path.with_name(segment_path.name + LINK_SUFFIX)
        self._listener = _make_socket()
        self._routes = count()
        self._connections: dict[bytes, _WriterConnection] = {}  # by route
        self._routes_by_fd: dict[int, bytes] = {}
        self._ready: deque[bytes] = deque()  # routes with something to read
        try:
            os.fchmod(self._listener.fileno(), 0o600)  # of the file that `bind` creates
            with _short_path(self._path) as address:
                self._listener.bind(address)
            self._listener.listen(_MAX_CONNECTIONS)
            self._epoll = select.epoll()
            self._epoll.register(self._listener, select.EPOLLIN)
        except OSError:
            self._listener.close()
            self._path.unlink(missing_ok=True)
            raise

    def receive(self) -> LinkMessage | None:
        """The next message of any writer, None if there is none now."""
        if not self._ready:
            self._poll()
        while self._ready:
            route = self._ready[0]
            connection = self._connections.get(route)
            message = connection.stream.receive() if connection is not None else None
            if message is not None:
                self._ready.rotate(-1)
                return LinkMessage(route, message, None)
            self._ready.popleft()
            if connection is not None and connection.stream.loss:
                self._drop(route)
        return None

    def _poll(self) -> None:
        for fd, events in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
                continue
            route = self._routes_by_fd.get(fd)
            if route is None:  # another process still has a copy of a descriptor closed here
                continue
            if events & select.EPOLLOUT:
                self._flush(route)
            if events & ~select.EPOLLOUT:
                self._ready.append(route)

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptors are left: writers use the network link from now on
            self._stop_listening()
            return
        if not _is_own_user(connected) or len(self._connections) >= _MAX_CONNECTIONS:
            connected.close()
            return
        connected.setblocking(False)
        try:
            self._epoll.register(connected, select.EPOLLIN)
        except OSError:
            connected.close()
            return
        route = next(self._routes).to_bytes(8, "big")
        self._connections[route] = _WriterConnection(connected)
        self._routes_by_fd[connected.fileno()] = route

    def send(self, route: bytes, header: bytes) -> bool:
        """Answer a writer. False if it is gone or does not read."""
        connection = self._connections.get(route)
        if connection is None:
            return False
        if len(connection.answers) >= _MAX_QUEUED_ANSWERS:
            return False
        connection.answers.append(pack_message(header, None))
        if len(connection.answers) == 1:
            self._flush(route)
        return True

    def _flush(self, route: bytes) -> None:
        """Send what waits, and poll for room if it is not all sent. A lost connection is dropped
        when it is read."""
        connection = self._connections[route]
        connection.flush()
        waits = bool(connection.answers) and not connection.stream.loss
        if waits != connection.polls_for_room:
            connection.polls_for_room = waits
            events = select.EPOLLIN | (select.EPOLLOUT if waits else 0)
            self._epoll.modify(connection.stream.socket, events)

    def _drop(self, route: bytes) -> None:
        connected = self._connections.pop(route).stream.socket
        del self._routes_by_fd[connected.fileno()]
        self._epoll.unregister(connected)
        connected.close()

    def _stop_listening(self) -> None:
        """Writers that wait to be accepted find their links lost."""
        self._path.unlink(missing_ok=True)
        if self._listener.fileno() >= 0:
            self._epoll.unregister(self._listener)
            self._listener.close()

    def read_pollables(self) -> Sequence[Pollable]:
        return (self._epoll.fileno(),)

    def close(self) -> None:
        """Idempotent."""
        if self._epoll.closed:
            return
        self._stop_listening()
        for route in list(self._connections):
            self._drop(route)
        self._epoll.close()


class HostDecodeLink:
    """Decode's network link together with its local one: implements DecodeLink."""

    def __init__(self, network: DecodeLink, local: LocalDecodeLink) -> None:
        self._network = network
        self._local = local
        self._is_local_turn = False

    @property
    def endpoint(self) -> str:
        return self._network.endpoint

    def receive(self) -> LinkMessage | None:
        """The next message; the links have the first turn alternately."""
        self._is_local_turn = not self._is_local_turn
        if self._is_local_turn:
            return self._receive_local() or self._receive_from_network()
        return self._receive_from_network() or self._receive_local()

    def _receive_local(self) -> LinkMessage | None:
        message = self._local.receive()
        return message and replace(message, reply_route=_LOCAL + message.reply_route)

    def _receive_from_network(self) -> LinkMessage | None:
        message = self._network.receive()
        return message and replace(message, reply_route=_NETWORK + message.reply_route)

    def send(self, route: bytes, header: bytes) -> bool:
        link = self._local if route.startswith(_LOCAL) else self._network
        return link.send(route[len(_LOCAL) :], header)

    def read_pollables(self) -> Sequence[Pollable]:
        return (*self._network.read_pollables(), *self._local.read_pollables())

    def counters(self) -> dict[str, float]:
        return self._network.counters()

    def close(self) -> None:
        self._local.close()
        self._network.close()
