"""Message links over TCP: DEALER at the writer, ROUTER at decode, CURVE on both.

Each end has a zmq context of its own, because a context has one authenticator. zmq's errors are
translated here.

ZMTP's heartbeats stay off: libzmq (4.3.5) aborts the whole process when a heartbeat falls due on a
connection that was reset while its reader was at the high-water mark (`Assertion failed:
!_io_error`, libzmq 4364). TCP detects a host that is gone; the hand-offs' own time-outs detect a
peer that is silent.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from baton.errors import ConfigError, PeerUnreachable
from baton.network.advertised_address import address_to_dial
from baton.network.connection_guard import ConnectionGuard
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core.frames import MAX_HEADER_BYTES
from kv_transfer.transports.links import LinkLoss, LinkMessage, Pollable
from kv_transfer.transports.zmq_keys import CurveKeys

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by the ZAP specification (ZeroMQ RFC 27)
_ZAP_DOMAIN = b"baton"
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
# Answers of about 100 bytes that may queue: more than a link's credit lets be outstanding.
_MAX_QUEUED_ANSWERS = 1 << 16
_REDIAL_MS = 100
_LINGER_MS = 200  # to send decode's last answers; a writer that misses one finds the link lost
_MAX_REFUSED_DIALS = 3  # refused connections after which a link that was never up is lost

ZmqSocket = zmq.Socket[bytes]
ZmqContext = zmq.Context[ZmqSocket]


def _configure(socket: ZmqSocket, settings: TransferSettings) -> None:
    timeout_ms = int(settings.link_timeout * 1000)
    socket.linger = 0
    socket.maxmsgsize = max(settings.max_payload_bytes, MAX_HEADER_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, timeout_ms)
    socket.setsockopt(zmq.TCP_MAXRT, timeout_ms)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, timeout_ms // 2000))  # seconds
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, max(1, timeout_ms // 2000))


class ZmqWriterLink:
    """The writer's end of a link: implements WriterLink."""

    def __init__(
        self, context: ZmqContext, endpoint: str, keys: CurveKeys, settings: TransferSettings
    ) -> None:
        self._endpoint = endpoint
        self._socket = context.socket(zmq.DEALER)
        _configure(self._socket, settings)
        self._socket.sndhwm, self._socket.rcvhwm = settings.max_queued_messages, _MAX_QUEUED_ANSWERS
        self._socket.setsockopt(zmq.RECONNECT_IVL, _REDIAL_MS)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, int(settings.link_timeout * 1000))
        self._socket.curve_serverkey = keys.decode.public
        self._socket.curve_publickey = keys.writer.public
        self._socket.curve_secretkey = keys.writer.secret
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CONNECT_RETRIED
            | _HANDSHAKE_FAILED
        )
        self._is_up = False
        self._refusals = 0
        self._loss: LinkLoss | None = None
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._loss = LinkLoss(
                PeerUnreachable(f"transfer endpoint {endpoint[:200]!r}: {error.strerror}"), False
            )

    def send(self, header: bytes, payload: memoryview | None = None) -> bool:
        parts: list[Any] = [header] if payload is None else [header, payload]
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=payload is None)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        if not _is_readable(self._socket):
            return None
        try:
            parts = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return parts[0]

    def get_loss(self) -> LinkLoss | None:
        while self._loss is None and _is_readable(self._monitor):
            self._on_monitor_event(recv_monitor_message(self._monitor)["event"])
        return self._loss

    def _on_monitor_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_up = True
        elif event & _HANDSHAKE_FAILED:
            self._set_loss("refused the handshake: is the cluster token the same?")
        elif event == zmq.EVENT_DISCONNECTED:
            self._set_loss(
                "the connection was lost"
                if self._is_up
                else "closed the connection during the handshake"
            )
        else:
            self._refusals += 1
            if self._refusals >= _MAX_REFUSED_DIALS:
                self._set_loss("does not accept connections")

    def _set_loss(self, reason: str) -> None:
        self._loss = LinkLoss(
            PeerUnreachable(f"transfer link to {self._endpoint}: {reason}"), self._is_up
        )

    def read_pollables(self) -> Sequence[Pollable]:
        return (self._socket, self._monitor)

    def write_pollable(self) -> Pollable | None:
        return self._socket

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)


def _is_readable(socket: ZmqSocket) -> bool:
    """Whether a message is there. A tenth of the cost of `poll` and of an exception of `recv`."""
    events: int = socket.getsockopt(zmq.EVENTS)  # type: ignore[assignment]
    return bool(events & zmq.POLLIN)


class ZmqDialer:
    """Makes ZmqWriterLinks: implements TransferDialer."""

    def __init__(self, keys: CurveKeys, settings: TransferSettings) -> None:
        self._context: ZmqContext = zmq.Context()
        self._keys = keys
        self._settings = settings

    def dial(self, endpoint: str) -> ZmqWriterLink:
        return ZmqWriterLink(self._context, endpoint, self._keys, self._settings)

    def close(self) -> None:
        """Every link must have been closed."""
        self._context.term()


class ZmqDecodeLink:
    """Decode's end of its links: implements DecodeLink."""

    def __init__(self, keys: CurveKeys, settings: TransferSettings) -> None:
        """Raises ConfigError when `settings.listen` cannot be bound."""
        self._counters: Counter[str] = Counter()
        self._keys = keys
        self._context: ZmqContext = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(_ZAP_ENDPOINT)
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket, settings)
        self._socket.sndhwm, self._socket.rcvhwm = _MAX_QUEUED_ANSWERS, settings.max_queued_messages
        self._socket.router_mandatory = True
        self._socket.zap_domain = _ZAP_DOMAIN
        self._socket.curve_server = True
        self._socket.curve_publickey = keys.decode.public
        self._socket.curve_secretkey = keys.decode.secret
        self._monitor = self._socket.get_monitor_socket(_HANDSHAKE_FAILED | zmq.EVENT_ACCEPTED)
        self._guard = ConnectionGuard()
        host, _, port = settings.listen.rpartition(":")
        try:
            self._socket.bind(f"tcp://{host}:{'*' if port in ('', '0') else port}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"transfer socket cannot listen on {settings.listen}: {error.strerror}"
            ) from error
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        port = bound.rpartition(":")[2]
        self._guard.watch_port("transfer", int(port), settings.port_limit())
        self._endpoint = (
            f"tcp://{address_to_dial(settings.advertise, port)}" if settings.advertise else bound
        )

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def receive(self) -> LinkMessage | None:
        self._serve_authentication()
        if not _is_readable(self._socket):
            return None
        try:
            # A DEALER sends at least one part.
            route, header, *payload_frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return LinkMessage(
            route.bytes, header.bytes, payload_frames[0].buffer if payload_frames else None
        )

    def send(self, route: bytes, header: bytes) -> bool:
        try:
            self._socket.send_multipart([route, header], zmq.NOBLOCK)
        except zmq.ZMQError:  # EHOSTUNREACH: the writer is gone; EAGAIN: it does not read
            self._counters["answers_undeliverable"] += 1
            return False
        return True

    def _serve_authentication(self) -> None:
        """Tell libzmq which client keys to accept (ZAP), and count failed handshakes.

        libzmq accepts connections without bound, so the guard checks their number at each one."""
        while _is_readable(self._monitor):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_ACCEPTED:
                self._guard.check_soon()
            else:
                self._counters["auth_failures"] += 1
        while _is_readable(self._zap):
            version, request_id, *_, credentials = self._zap.recv_multipart()
            allowed = credentials == z85.decode(self._keys.writer.public)
            status = (
                (b"200", b"OK", b"writer")
                if allowed
                else (b"400", b"not a writer of this cluster", b"")
            )
            self._zap.send_multipart([version, request_id, *status, b""])

    def read_pollables(self) -> Sequence[Pollable]:
        return (self._socket, self._zap, self._monitor)

    def counters(self) -> dict[str, float]:
        return {
            **self._counters,
            "connections_refused": self._guard.get_refused_counts().get("transfer", 0),
        }

    def close(self) -> None:
        self._guard.close()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(_LINGER_MS)
        self._zap.close(0)
        self._context.term()
