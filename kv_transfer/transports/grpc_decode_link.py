"""Decode's end of the grpc links: it listens, and each writer has one stream.

For each stream one thread reads and one writes; queues connect them with the plane's thread. When
the plane does not take a stream's messages, the stream is read no further, and HTTP/2's flow
control slows its writer down.
"""

import hmac
import queue
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from baton.errors import ConfigError
from baton.network.advertised_address import address_to_dial
from baton.network.cluster_certificates import decode_server_credentials
from baton.network.connection_guard import ConnectionGuard
from baton.network.grpc_options import grpc_server_options
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core.message_framing import unpack_message
from kv_transfer.transports.grpc_protocol import (
    METHOD,
    PROOF_KEY,
    SCHEME,
    SERVICE,
    channel_options,
    stream_proof,
)
from kv_transfer.transports.links import EventFd, LinkMessage, Pollable

_MAX_STREAMS = 256
_MAX_STREAMS_PER_CONNECTION = 4  # a writer has one
# Answers of about 100 bytes that may queue per stream: more than its credit lets be outstanding.
_MAX_QUEUED_ANSWERS = 1 << 16
_LINGER_SECONDS = 0.2  # to send the last answers; a writer that misses one finds the link lost


class _WriterStream:
    """The stream of one writer."""

    def __init__(self, route: bytes, capacity: int) -> None:
        self.reply_route = route
        self.answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None ends them
        self.free_slots = threading.Semaphore(capacity)


class GrpcDecodeLink:
    """Decode's end of its links: implements DecodeLink."""

    def __init__(self, token: str, settings: TransferSettings) -> None:
        """Raises ConfigError when `settings.listen` cannot be bound."""
        self._expected_proof = stream_proof(token)
        self._capacity = settings.max_queued_messages
        self._counters: Counter[str] = Counter()
        self._wakeup = EventFd()
        self._guard = ConnectionGuard()
        self._incoming: queue.SimpleQueue[tuple[_WriterStream, bytes]] = queue.SimpleQueue()
        self._streams: dict[bytes, _WriterStream] = {}
        self._is_closing = False
        self._lock = threading.Lock()  # guards the last two
        self._threads = ThreadPoolExecutor(_MAX_STREAMS, thread_name_prefix="transfer-grpc-answers")
        self._server = grpc.server(
            self._threads, options=_server_options(settings), maximum_concurrent_rpcs=_MAX_STREAMS
        )
        handler = grpc.stream_stream_rpc_method_handler(self._serve_stream)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )
        host, _, port = settings.listen.rpartition(":")
        try:
            bound = self._server.add_secure_port(
                f"{host}:{port or 0}", decode_server_credentials(token)
            )
        except RuntimeError as error:
            self.close()
            raise ConfigError(
                f"transfer socket cannot listen on {settings.listen}: {error}"
            ) from error
        address = (
            address_to_dial(settings.advertise, str(bound))
            if settings.advertise
            else f"{host}:{bound}"
        )
        self._endpoint = f"{SCHEME}://{address}"
        self._server.start()
        self._guard.watch_port("transfer", bound, settings.port_limit())

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def _serve_stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Serve one stream, on a thread of the pool. Yields the answers."""
        proof = dict(context.invocation_metadata()).get(PROOF_KEY, b"")
        if not hmac.compare_digest(proof, self._expected_proof):
            self._counters["auth_failures"] += 1
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED, f"metadata {PROOF_KEY} is missing or wrong"
            )
        stream = _WriterStream(secrets.token_bytes(8), self._capacity)
        with self._lock:
            if self._is_closing:
                return
            self._streams[stream.reply_route] = stream
        if not context.add_callback(lambda: self._end_stream(stream)):  # has ended already
            self._end_stream(stream)
            return
        context.send_initial_metadata(())
        reader = threading.Thread(
            target=self._read_stream,
            args=(stream, requests),
            name="transfer-grpc-frames",
            daemon=True,
        )
        reader.start()
        while (answer := stream.answers.get()) is not None:
            yield answer

    def _read_stream(self, stream: _WriterStream, requests: Iterator[bytes]) -> None:
        try:
            for data in requests:
                stream.free_slots.acquire()
                self._incoming.put((stream, data))
                self._wakeup.set()
        except grpc.RpcError:  # the writer is gone, or its message was too long
            self._counters["streams_broken"] += 1
        stream.answers.put(None)

    def _end_stream(self, stream: _WriterStream) -> None:
        with self._lock:
            self._streams.pop(stream.reply_route, None)
        stream.answers.put(None)
        stream.free_slots.release()

    def receive(self) -> LinkMessage | None:
        self._wakeup.clear()
        try:
            stream, data = self._incoming.get_nowait()
        except queue.Empty:
            return None
        self._wakeup.set()  # there may be more
        stream.free_slots.release()
        return LinkMessage(stream.reply_route, *unpack_message(data))

    def send(self, route: bytes, header: bytes) -> bool:
        with self._lock:
            stream = self._streams.get(route)
        if stream is None or stream.answers.qsize() >= _MAX_QUEUED_ANSWERS:
            self._counters["answers_undeliverable"] += 1
            return False
        stream.answers.put(header)
        return True

    def read_pollables(self) -> Sequence[Pollable]:
        return (self._wakeup.fd,)

    def counters(self) -> dict[str, float]:
        return {
            **self._counters,
            "connections_refused": self._guard.get_refused_counts().get("transfer", 0),
        }

    def close(self) -> None:
        self._guard.close()
        with self._lock:
            self._is_closing = True
            streams = list(self._streams.values())
        for stream in streams:
            stream.answers.put(None)  # the stream ends when the last answer has been sent
        self._server.stop(_LINGER_SECONDS).wait()
        # Every thread has got its None. gRPC would keep them until the interpreter ends.
        self._threads.shutdown()
        self._wakeup.close()


def _server_options(settings: TransferSettings) -> list[tuple[str, Any]]:
    timeout_ms = int(settings.link_timeout * 1000)
    return [
        *channel_options(settings),
        *grpc_server_options(settings.port_limit(), streams=_MAX_STREAMS_PER_CONNECTION),
        ("grpc.server_handshake_timeout_ms", timeout_ms),
        # Writers may ping this often.
        ("grpc.http2.min_ping_interval_without_data_ms", timeout_ms // 2),
    ]
