"""Serves an HTTP application on a port, in the event loop that is already running."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from baton.errors import ConfigError
from baton.process import log
from baton.process.log_rate_limit import RateLimitedLogger
from coordinator.frontend.http.server.bounded_protocol import BoundedHttpProtocol, ConnectionTable

_limited = RateLimitedLogger()
BACKLOG = 1024
_SEND_BUFFER = 64 << 10  # bytes of each connection's kernel buffer, which a slow reader can fill
_TCP_USER_TIMEOUT_MS = 30_000  # the kernel disconnects a peer that accepts no byte for so long
# Longer than clients keep idle connections, so that they do not reuse one while it is closed.
_KEEP_ALIVE_SECONDS = 75


def bind_http_socket(host: str, port: int, flag: str) -> socket.socket:
    """Return a listening socket; port 0 picks a free port. Raises ConfigError naming `flag`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # These three options are inherited by the accepted sockets.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MS)
        listening.bind((host, port))
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port} ({reason}): choose another {flag}, 0 for any"
        ) from None
    return listening


class HttpServer(uvicorn.Server):
    """One application on one bound socket. It handles no signals."""

    def __init__(
        self,
        app: ASGIApp,
        listening: socket.socket,
        connections: ConnectionTable,
        grace: float = 5.0,
    ) -> None:
        host, self.port = listening.getsockname()[:2]
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self._socket = listening
        self.listening = asyncio.Event()
        self._stopping = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(
                    "type[asyncio.Protocol]", partial(BoundedHttpProtocol, table=connections)
                ),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                # Connections that may arrive at once, before one can be closed.
                backlog=min(BACKLOG, connections.limit.max_connections),
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(grace),
            )
        )
        _route_uvicorn_logs()

    async def run_until_stopped(self) -> None:
        with self._socket:  # also when it is cancelled before it serves
            await self.serve(sockets=[self._socket])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def stop(self) -> None:
        """Accept no more connections, let open responses end, and end `run_until_stopped`."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Keep the Date header current, and return at once when stopped."""
        while not self._stopping.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _StructuredLogHandler(logging.Handler):
    """Writes uvicorn's log lines in our format, with only the kind and place of exceptions.

    The message of an exception may quote a prompt.
    """

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        fields = log.get_error_fields(error) if error is not None else {}
        _limited.log_event(
            partial(log.get_logger("uvicorn").log, record.levelno),
            record.getMessage().strip(),
            **fields,
        )


def _route_uvicorn_logs() -> None:
    logger = logging.getLogger("uvicorn.error")
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    logger.handlers = [_StructuredLogHandler()]
