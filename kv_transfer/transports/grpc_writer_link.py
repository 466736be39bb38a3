"""The writer's end of a grpc link: one bidirectional stream, over a connection of its own.

The plane's thread puts messages into a bounded queue and never blocks; gRPC's own threads take them
and do block. gRPC's errors are translated here.
"""

import queue
import re
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from baton.errors import PeerUnreachable
from baton.network.cluster_certificates import DECODE_CERTIFICATE_NAME, writer_channel_credentials
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core.message_framing import pack_message
from kv_transfer.transports.grpc_protocol import (
    METHOD,
    PROOF_KEY,
    SCHEME,
    SERVICE,
    channel_options,
    stream_proof,
)
from kv_transfer.transports.links import EventFd, LinkLoss, Pollable

_ADDRESS = re.compile(rf"{SCHEME}://((?:\[[0-9a-fA-F:.%]+\]|[^\[\]:/]+):\d{{1,5}})")
_CLOSE_TIMEOUT = 1.0  # seconds to wait for a cancelled call

_QueuedMessage = tuple[bytes, memoryview | None]


class GrpcWriterLink:
    """The writer's end of a link: implements WriterLink."""

    def __init__(
        self,
        endpoint: str,
        credentials: grpc.ChannelCredentials,
        proof: bytes,
        settings: TransferSettings,
    ) -> None:
        self._endpoint = endpoint
        self._wakeup = EventFd()
        self._capacity = settings.max_queued_messages
        self._outgoing: queue.SimpleQueue[_QueuedMessage | None] = queue.SimpleQueue()
        self._wants_room = False
        self._incoming: deque[bytes] = deque()
        self._is_up = False
        self._loss: LinkLoss | None = None
        self._channel: grpc.Channel | None = None
        address = _ADDRESS.fullmatch(endpoint)
        if address is None:
            self._set_loss("is no HOST:PORT")
            return
        self._channel = grpc.secure_channel(
            f"dns:///{address[1]}", credentials, _channel_options(settings)
        )
        write = self._channel.stream_stream(
            f"/{SERVICE}/{METHOD}", request_serializer=lambda parts: pack_message(*parts)
        )
        self._call = write(self._iter_outgoing(), metadata=((PROOF_KEY, proof),))
        self._reader = threading.Thread(
            target=self._read, name="transfer-grpc-answers", daemon=True
        )
        self._reader.start()

    def send(self, header: bytes, payload: memoryview | None = None) -> bool:
        if self._outgoing.qsize() >= self._capacity:
            self._wants_room = True
            # Check again: room may have been made before `_wants_room` was set.
            if self._outgoing.qsize() >= self._capacity:
                return False
        self._outgoing.put((header, payload))
        return True

    def _iter_outgoing(self) -> Iterator[_QueuedMessage]:
        """The messages to send. gRPC takes the next on its own thread once one is on its way."""
        while (parts := self._outgoing.get()) is not None:
            if self._wants_room:
                self._wants_room = False
                self._wakeup.set()
            yield parts

    def _read(self) -> None:
        """Receive answers on a thread of its own, until the stream ends."""
        try:
            self._call.initial_metadata()  # arrives when decode has accepted the stream
            self._is_up = self._call.is_active()
            for header in self._call:
                self._incoming.append(header)
                self._wakeup.set()
            self._set_loss("decode has closed it")
        except grpc.RpcError as error:
            self._set_loss(self._describe_error(error))
        self._outgoing.put(None)
        self._wakeup.set()

    def _describe_error(self, error: Any) -> str:
        code, details = error.code(), str(error.details())[:200]
        if code is grpc.StatusCode.UNAVAILABLE and not self._is_up:
            return (
                "no connection, or the handshake was refused: is the cluster token the same? "
                f"({details})"
            )
        return f"{code.name}: {details}"

    def _set_loss(self, reason: str) -> None:
        self._loss = LinkLoss(
            PeerUnreachable(f"transfer link to {self._endpoint[:200]}: {reason}"), self._is_up
        )

    def receive(self) -> bytes | None:
        self._wakeup.clear()
        try:
            header = self._incoming.popleft()
        except IndexError:
            return None
        self._wakeup.set()  # there may be more
        return header

    def get_loss(self) -> LinkLoss | None:
        """Why the link is lost, once every message that arrived before has been received."""
        return None if self._incoming else self._loss

    def read_pollables(self) -> Sequence[Pollable]:
        return (self._wakeup.fd,)

    def write_pollable(self) -> Pollable | None:
        return None

    def close(self) -> None:
        if self._channel is not None:
            self._outgoing.put(None)
            self._call.cancel()
            self._reader.join(_CLOSE_TIMEOUT)
            self._channel.close()
        self._wakeup.close()


def _channel_options(settings: TransferSettings) -> list[tuple[str, Any]]:
    timeout_ms = int(settings.link_timeout * 1000)
    return [
        *channel_options(settings),
        ("grpc.ssl_target_name_override", DECODE_CERTIFICATE_NAME),
        # A new link is a new connection: the old one may be dead.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),  # gRPC would keep a second copy of every message
        ("grpc.min_reconnect_backoff_ms", timeout_ms),  # time for a connection to be made
    ]


class GrpcDialer:
    """Makes GrpcWriterLinks: implements TransferDialer."""

    def __init__(self, token: str, settings: TransferSettings) -> None:
        self._token = token
        self._settings = settings

    def dial(self, endpoint: str) -> GrpcWriterLink:
        return GrpcWriterLink(
            endpoint,
            writer_channel_credentials(self._token),
            stream_proof(self._token),
            self._settings,
        )

    def close(self) -> None:
        pass
