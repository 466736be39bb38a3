"""Message links between processes of one user on one host: a Unix socket beside decode's segment.

Writers of one-sided transports use it, because they share the segment folder with decode anyway. A
message over zmq wakes two more threads, one in each process: zmq's own. Over a Unix socket a round
trip takes a quarter of the time.

Only processes of this user can connect: the socket's file is private, and both ends check whose
process the other one is. Such a process can map the segment as well, so nothing is encrypted and
the cluster token is not asked for.

A message on the stream is its length in 4 bytes, little-endian, then the header. Payloads do not
travel here.
"""

import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid: struct ucred


def local_endpoint(folder: Path, segment: str) -> str:
    """The endpoint of a segment's local link; empty if it has none."""
    if SEGMENT_NAME.fullmatch(segment) is None or not (folder / (segment + LINK_SUFFIX)).exists():
        return ""
    return f"{LOCAL_SCHEME}://{segment}"


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
        """The next message, None if there is none now."""
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
        connection is lost: the next call must be for the same message."""
        while self._num_sent < len(message):
            try:
                self._num_sent += self.socket.send(memoryview(message)[self._num_sent :])
            except BlockingIOError:
                return False
            except OSError as error:
                self.loss = error.strerror or "the connection was lost"
                return False
        self._num_sent = 0
        return True


class LocalWriterLink:
    """The writer's end: implements WriterLink."""

    def __init__(self, path: Path) -> None:
        """Connects at once; what fails is reported by `get_loss`."""
        self._path = path
        self._stream = _MessageStream(_make_socket())
        self._fd = self._stream.socket.fileno()
        self._is_up = False
        try:
            with _short_path(path) as address:
                self._stream.socket.connect(address)
            self._is_up = _is_own_user(self._stream.socket)
            self._stream.loss = "" if self._is_up else "the process is another user's"
        except OSError as error:
            self._stream.loss = error.strerror or "it cannot be dialled"

    @property
    def is_up(self) -> bool:
        return self._is_up

    def send(self, header: bytes, payload: memoryview | None = None) -> bool:
        assert payload is None, "a payload over a local link"
        return not self._stream.loss and self._stream.try_send(pack_message(header, None))

    def receive(self) -> bytes | None:
        return self._stream.receive()

    def get_loss(self) -> LinkLoss | None:
        if not self._stream.loss:
            return None
        error = PeerUnreachable(f"local transfer link {self._path.name}: {self._stream.loss}")
        return LinkLoss(error, self._is_up)

    def read_pollables(self) -> Sequence[Pollable]:
        return (self._fd,)

    def write_pollable(self) -> Pollable | None:
        return self._fd

    def close(self) -> None:
        self._stream.socket.close()


class LocalDialer:
    """Makes LocalWriterLinks: implements TransferDialer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unreachable: set[str] = set()  # endpoints that cannot be dialled from here

    def find_endpoint(self, segment: str) -> str:
        """The endpoint of a segment's link; empty if there is none that can be dialled."""
        endpoint = local_endpoint(self._folder, segment)
        return "" if endpoint in self._unreachable else endpoint

    def dial(self, endpoint: str) -> LocalWriterLink:
        segment = endpoint.removeprefix(f"{LOCAL_SCHEME}://")
        link = LocalWriterLink(self._folder / (segment + LINK_SUFFIX))
        if not link.is_up:
            self._unreachable.add(endpoint)
        return link

    def close(self) -> None:
        pass


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
        except OSError:
            self._listener.close()
            raise
        self._epoll.register(self._listener, select.EPOLLIN)

    def has_route(self, route: bytes) -> bool:
        return route in self._connections

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
            route = self._routes_by_fd[fd]
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
        route = b"local-link" + next(self._routes).to_bytes(8, "big")
        self._connections[route] = _WriterConnection(connected)
        self._routes_by_fd[connected.fileno()] = route
        self._epoll.register(connected, select.EPOLLIN)

    def send(self, route: bytes, header: bytes) -> bool:
        """Answer a writer that has a route here. False if it does not read."""
        connection = self._connections[route]
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
        connection = self._connections.pop(route)
        del self._routes_by_fd[connection.stream.socket.fileno()]
        connection.stream.socket.close()

    def _stop_listening(self) -> None:
        self._path.unlink(missing_ok=True)
        with suppress(OSError):  # it is not registered any more
            self._epoll.unregister(self._listener)

    def read_pollables(self) -> Sequence[Pollable]:
        return (self._epoll.fileno(),)

    def close(self) -> None:
        """Idempotent."""
        if self._epoll.closed:
            return
        self._stop_listening()
        for route in list(self._connections):
            self._drop(route)
        self._listener.close()
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
        first, second = self._network.receive, self._local.receive
        if self._is_local_turn:
            first, second = second, first
        return first() or second()

    def send(self, route: bytes, header: bytes) -> bool:
        link = self._local if self._local.has_route(route) else self._network
        return link.send(route, header)

    def read_pollables(self) -> Sequence[Pollable]:
        return (*self._network.read_pollables(), *self._local.read_pollables())

    def counters(self) -> dict[str, float]:
        return self._network.counters()

    def close(self) -> None:
        self._local.close()
        self._network.close()
