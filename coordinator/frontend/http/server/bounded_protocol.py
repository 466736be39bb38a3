"""uvicorn's HTTP protocol within bounds, with errors in OpenAI's format.

Buffers and waits are bounded, and so are connections: those of a port are in one table, which
chooses the one to close when there are too many.
"""

import asyncio
from collections import Counter
from typing import Any, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.errors import InvalidRequest
from baton.limits import BODY_TIMEOUT_SECONDS, MAX_BODY_BYTES
from baton.network.bind_policy import is_loopback
from baton.network.connection_limits import LOG_LINES_PER_SECOND, PortLimit
from baton.process import log
from baton.process.log_rate_limit import RateLimitedLogger
from coordinator.frontend.http import errors

_log = log.get_logger("http")


class AbortableConnection(Protocol):
    def abort_connection(self) -> None: ...


class ConnectionTable:
    """All connections of one port. A connection without a request in progress is idle.

    When there are too many, the connection that has been idle longest is closed; if no other is
    idle, the one whose request has been arriving for longest; else the new one. A new connection
    whose address has too many is closed, too.
    """

    def __init__(self, port: str, limit: PortLimit) -> None:
        """`port` is the name of the port in logs."""
        self.limit = limit
        self.refused_connections = 0  # closed because there were too many
        self._port = port
        self._addresses: dict[AbortableConnection, str] = {}
        self._idle: dict[AbortableConnection, None] = {}  # longest idle first
        self._arriving: dict[AbortableConnection, None] = {}  # longest arriving first
        self._per_address: Counter[str] = Counter()
        self._limited = RateLimitedLogger(burst=1, per_second=LOG_LINES_PER_SECOND)

    def __len__(self) -> int:
        return len(self._addresses)

    def add_connection(self, connection: AbortableConnection, address: str) -> None:
        self._addresses[connection] = address
        self._idle[connection] = None
        self._per_address[address] += 1
        if self._per_address[address] > self.limit.max_per_address and not is_loopback(address):
            self._refuse_connection(connection)
        elif len(self) > self.limit.max_connections:
            self._refuse_connection(self._least_needed(connection))

    def remove_connection(self, connection: AbortableConnection) -> None:
        """Remove a connection that has ended. Idempotent."""
        address = self._addresses.pop(connection, None)
        self._idle.pop(connection, None)
        self._arriving.pop(connection, None)
        if address is not None:
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]

    def mark_arriving(self, connection: AbortableConnection) -> None:
        """The head of a request has arrived, and no other request is in progress."""
        self._idle.pop(connection, None)
        if connection in self._addresses:
            self._arriving[connection] = None

    def mark_busy(self, connection: AbortableConnection) -> None:
        """A whole request has arrived."""
        self._idle.pop(connection, None)
        self._arriving.pop(connection, None)

    def mark_idle(self, connection: AbortableConnection) -> None:
        """The response has been sent."""
        self._arriving.pop(connection, None)
        if connection in self._addresses:
            self._idle[connection] = None

    def _least_needed(self, newest: AbortableConnection) -> AbortableConnection:
        longest_idle = next(iter(self._idle))
        return longest_idle if longest_idle is not newest else next(iter(self._arriving), newest)

    def _refuse_connection(self, connection: AbortableConnection) -> None:
        self.refused_connections += 1
        self.remove_connection(connection)
        connection.abort_connection()
        self._limited.log_event(
            _log.warning,
            f"too many connections to the {self._port} port: one was closed",
            port=self._port,
            limit=self.limit.max_connections,
            limit_per_address=self.limit.max_per_address,
            knob="ulimit -n, --max-connections, --max-connections-per-address",
        )


MAX_HEAD_BYTES = 64 << 10  # request line and headers
# Of a body that is too large: read and dropped, so that the client receives the 413.
MAX_DROPPED_BYTES = 4 * MAX_BODY_BYTES
_PARSE_SLICE_BYTES = 16 << 10  # parsed at once; so much of a pipelined head may be uncounted
WRITE_HIGH, WRITE_LOW = 64 << 10, 16 << 10  # bytes written and not yet taken by the kernel
HEAD_TIMEOUT_SECONDS = 30.0
# A connection is closed after so long in one body, also if nothing reads the body any more.
BODY_CLOSE_SECONDS = BODY_TIMEOUT_SECONDS + 5.0

_limited = RateLimitedLogger()


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections that send an endless head or body, or no request at all."""

    def __init__(self, *arguments: Any, table: ConnectionTable, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._connection_table = table

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(WRITE_HIGH, WRITE_LOW)
        self._in_head = True
        self._head_bytes = 0
        self._body_bytes = 0
        self._body_timer: asyncio.TimerHandle | None = None
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self._on_head_timeout)
        self._connection_table.add_connection(self, self.client[0] if self.client else "")

    def abort_connection(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        if self._body_timer is not None:
            self._body_timer.cancel()
        self._connection_table.remove_connection(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser in slices, so that it never holds more of a head than the bound."""
        unread = memoryview(data)
        while unread and not self.transport.is_closing():
            part = unread[:_PARSE_SLICE_BYTES]
            if self._in_head:
                part = part[: MAX_HEAD_BYTES - self._head_bytes]
                self._head_bytes += len(part)
                if not part:
                    self.send_400_response(
                        f"the request's head is longer than {MAX_HEAD_BYTES} bytes"
                    )
                    return
            self._parse(part)
            unread = unread[len(part) :]

    def _parse(self, data: memoryview) -> None:
        """Feed the parser, also with what follows the head of a request to upgrade.

        Such a request is answered like any other, as RFC 9110 (7.8) allows: Java's HTTP client asks
        for h2c with every first request. The parser would skip its body, and read it as the next
        request. So the parser gets the head once more, without the header.
        """
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    self.parser.feed_data(self._head_without_upgrade)
                    data = data[upgrade.args[0] :]  # a body, and perhaps more requests
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self._on_head_timeout)
        self.scope["state"]["hang_up"] = self.transport.close

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._head_without_upgrade = self._format_head_without_upgrade()
            return
        self._in_head = False
        self._head_timer.cancel()
        self._head_bytes = self._body_bytes = 0
        if self._is_idle():
            self._connection_table.mark_arriving(self)
        self._body_timer = self.loop.call_later(BODY_CLOSE_SECONDS, self.transport.close)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self._connection_table.mark_idle(self)
        elif not self._in_head and len(self.pipeline) == 1:
            self._connection_table.mark_arriving(self)  # the next request's head is here already
        super().on_response_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > MAX_DROPPED_BYTES:
            self.transport.abort()
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # it begins again in _parse
        self._in_head = True
        if self._body_timer is not None:
            self._body_timer.cancel()
        if not self._is_idle():  # else it was answered before its body arrived
            self._connection_table.mark_busy(self)
        super().on_message_complete()

    def _format_head_without_upgrade(self) -> bytes:
        """Return the head that was parsed without its Upgrade headers.

        Raises HttpParserError for CONNECT, which asks for a tunnel without any such header.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError("CONNECT is not supported")
        fields = [
            b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"
        ]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(fields))

    def _is_idle(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _on_head_timeout(self) -> None:
        if self._is_idle():  # else a response is being sent to this client
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP; in the middle of a response, only close the connection."""
        _limited.log_event(
            _log.info, "malformed http request rejected", code=InvalidRequest.code, reason=msg
        )
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = errors.encode_error_body(InvalidRequest(msg))
            head = (
                "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
