"""The node link on the wire: NodeLink.Attach with checked and numbered messages.

Each message ends in a checksum of all bytes before it. gRPC leaves integrity to TCP, whose 16-bit
checksum middleboxes rewrite and memory errors bypass. A flipped bit in a token id or a prompt would
still make a valid message, and a wrong answer with status 200. Both ends read None for a damaged
message, and end the stream. Messages are numbered as well: a repeated one is skipped, and a missing
one ends the stream as soon as the next arrives, so that nothing waits for a lost message.

`NodeStream` is the coordinator's sending half. `CoordinatorLink` is the whole of a member's end.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import xxhash
from google.protobuf.message import DecodeError, Message

from baton.cluster_link.messages import LinkControl, NodeOrder, Ping
from baton.cluster_link.order_codec import encode_order
from baton.limits import MAX_UNSENT_MESSAGES
from baton.pb import cluster_pb2
from baton.process import log
from baton.process.failpoints import FAILPOINTS, FailpointAction

_SERVICE = cluster_pb2.DESCRIPTOR.services_by_name["NodeLink"]
_METHOD = _SERVICE.methods_by_name["Attach"]
_FIXED64 = 1  # protobuf wire type
_TAG = bytes([cluster_pb2.NodeMessage.CHECKSUM_FIELD_NUMBER << 3 | _FIXED64])
_LAST_WRITE_SECONDS = 1.0  # for a write that is in progress when the stream ends
_log = log.get_logger("node_link")

M = TypeVar("M", bound=Message)


def encode_checked(message: Message) -> bytes:
    """Serialize a message with its checksum (XXH3, 64 bits) as the last field."""
    body = message.SerializeToString()
    return body + _TAG + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def decode_checked(kind: type[M], data: bytes) -> M | None:
    """Parse a message that `encode_checked` made. None if it is damaged."""
    body, tag, checksum = data[:-9], data[-9:-8], data[-8:]
    if tag != _TAG or xxhash.xxh3_64_intdigest(body) != int.from_bytes(checksum, "little"):
        return None
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


class MessagesLost(Exception):
    """One or more message numbers were skipped."""


class SequenceNumbers:
    """Message numbers of one direction of one stream, at one of its ends."""

    def __init__(self) -> None:
        self._last = 0

    def number_message(
        self, message: cluster_pb2.NodeMessage | cluster_pb2.CoordinatorMessage
    ) -> None:
        self._last += 1
        message.number = self._last

    def accept_message(
        self, message: cluster_pb2.NodeMessage | cluster_pb2.CoordinatorMessage
    ) -> bool:
        """Whether the message is new. Raises MessagesLost if messages before it are missing."""
        if message.number > self._last + 1:
            raise MessagesLost(f"message {message.number} follows {self._last}")
        is_new: bool = message.number == self._last + 1
        self._last += is_new
        return is_new


async def send_message(
    put: Callable[[Any], Awaitable[None]], message: Message, failpoint: str
) -> None:
    """Write a numbered message to the stream, or drop or duplicate it as `failpoint` demands."""
    action = None
    if failpoint in FAILPOINTS.armed:
        # On a thread, because a delay must not hold the event loop.
        action = await asyncio.to_thread(FAILPOINTS.hit, failpoint)
    if action is not FailpointAction.DROP:
        await put(message)
    if action is FailpointAction.DUPLICATE:
        await put(message)


class NodeStream:
    """The sending half of one node's stream: a bounded outbox, and pings while it is empty."""

    def __init__(self, heartbeat: float) -> None:
        self.closed = asyncio.Event()
        self._heartbeat = heartbeat
        self._outbox: deque[NodeOrder | LinkControl] = deque()
        self._wake = asyncio.Event()

    def send_order(self, order: NodeOrder | LinkControl) -> None:
        if len(self._outbox) >= MAX_UNSENT_MESSAGES and not self.closed.is_set():
            _log.error(
                "send queue to a node full, closing its stream", unsent_messages=MAX_UNSENT_MESSAGES
            )
            self.close()
        if not self.closed.is_set():
            self._outbox.append(order)
            self._wake.set()

    def close(self) -> None:
        self.closed.set()

    async def write_messages(self, context: Any) -> None:
        """Write queued messages until cancelled."""
        numbers = SequenceNumbers()
        while True:
            while self._outbox:
                message = encode_order(self._outbox.popleft())
                numbers.number_message(message)
                await _write_message(context, message)
            self._wake.clear()
            try:
                async with asyncio.timeout(self._heartbeat):
                    await self._wake.wait()
            except TimeoutError:
                self.send_order(Ping())


async def _write_message(context: Any, message: cluster_pb2.CoordinatorMessage) -> None:
    """Write a message; on cancellation, give the write _LAST_WRITE_SECONDS to complete.

    gRPC cannot end a stream during a write, so that the node would not learn of its end.
    """
    writing = asyncio.ensure_future(send_message(context.write, message, "link.coordinator.send"))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait({writing}, timeout=_LAST_WRITE_SECONDS)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        raise


def open_link_stream(
    channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str | bytes]]
) -> grpc.aio.StreamStreamCall:
    """Open a node's stream: it writes NodeMessages and reads CoordinatorMessages or None."""
    attach = channel.stream_stream(
        f"/{_SERVICE.full_name}/{_METHOD.name}",
        request_serializer=encode_checked,
        response_deserializer=lambda data: decode_checked(cluster_pb2.CoordinatorMessage, data),
    )
    return attach(metadata=metadata)


def add_link_service(server: grpc.aio.Server, attach: Callable[[Any, Any], Any]) -> None:
    """Serve NodeLink.Attach with `attach(iterator, context)`, the coordinator's end."""
    handler = grpc.stream_stream_rpc_method_handler(
        attach,
        request_deserializer=lambda data: decode_checked(cluster_pb2.NodeMessage, data),
        response_serializer=encode_checked,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_SERVICE.full_name, {_METHOD.name: handler}),)
    )
