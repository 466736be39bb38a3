"""A minimal HTTP/1.1 client that POSTs a JSON body and reads the answer as it arrives.

The load generator shares the machine with the measured system, so it does little per message. Every
request has its own connection.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 64 << 10  # also the longest line of a chunked body
MAX_CHUNK_BYTES = 16 << 20
_READ_BYTES = 64 << 10


class HttpError(Exception):
    """The answer is not HTTP or ended early."""


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """The address of an API."""

    host: str
    port: int
    uses_tls: bool
    base_path: str  # without a trailing slash


def parse_url(url: str) -> HttpTarget:
    """Parse http://HOST[:PORT][/BASE], or https. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an http:// or https:// URL")
    tls = parts.scheme == "https"
    return HttpTarget(
        parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/")
    )


class StreamedResponse:
    """A response whose status and headers have been read; `iter_body()` streams the body."""

    def __init__(
        self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader
    ) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    def iter_body(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises HttpError when it ends early."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            return self._iter_chunked()
        return self._iter_plain(self.headers.get("content-length"))

    async def read_body(self, max_bytes: int = MAX_CHUNK_BYTES) -> bytes:
        body = b""
        async for chunk in self.iter_body():
            body += chunk
            if len(body) > max_bytes:
                raise HttpError(f"the body is longer than {max_bytes} bytes")
        return body

    async def _iter_chunked(self) -> AsyncIterator[bytes]:
        while True:
            line = await _read_line(self._reader)
            try:
                size = int(line.partition(b";")[0], 16)
            except ValueError:
                raise HttpError("a chunk has no length") from None
            if not 0 <= size <= MAX_CHUNK_BYTES:
                raise HttpError(f"a chunk has {size} bytes: at most {MAX_CHUNK_BYTES} are read")
            if size == 0:
                return
            chunk = await _read_exactly(self._reader, size + 2)
            yield chunk[:-2]

    async def _iter_plain(self, length: str | None) -> AsyncIterator[bytes]:
        remaining = int(length) if length is not None else None
        while remaining is None or remaining > 0:
            chunk = await self._reader.read(
                _READ_BYTES if remaining is None else min(_READ_BYTES, remaining)
            )
            if not chunk:
                if remaining is None:
                    return
                raise HttpError(f"the body broke off {remaining} bytes before its end")
            remaining = None if remaining is None else remaining - len(chunk)
            yield chunk


@asynccontextmanager
async def open_request(
    target: HttpTarget, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> AsyncIterator[StreamedResponse]:
    """Send a request and yield the response; the connection closes with the block.

    Raises OSError or HttpError.
    """
    context = ssl.create_default_context() if target.uses_tls else None
    reader, writer = await asyncio.open_connection(
        target.host, target.port, ssl=context, limit=MAX_HEAD_BYTES
    )
    try:
        writer.write(_request_head(target, method, path, headers, len(body)) + body)
        await writer.drain()
        yield await _read_head(reader)
    finally:
        writer.close()


def _request_head(
    target: HttpTarget, method: str, path: str, headers: Mapping[str, str], length: int
) -> bytes:
    host = f"[{target.host}]" if ":" in target.host else target.host
    fields = {
        "Host": f"{host}:{target.port}",
        "Connection": "close",
        "Content-Length": str(length),
        **headers,
    }
    lines = [
        f"{method} {target.base_path}{path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in fields.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _read_head(reader: asyncio.StreamReader) -> StreamedResponse:
    words = (await _read_line(reader)).split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise HttpError("the answer is not HTTP/1")
    headers: dict[str, str] = {}
    while line := await _read_line(reader):
        name, _, value = line.partition(b":")
        headers[name.decode("latin-1").strip().lower()] = value.decode("latin-1").strip()
        if len(headers) > 256:
            raise HttpError("the answer has more than 256 headers")
    return StreamedResponse(int(words[1]), headers, reader)


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Return a line without its end. Raises HttpError when the stream ends before."""
    try:
        return (await reader.readuntil(b"\r\n"))[:-2]
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        raise HttpError("the response ended early") from None


async def _read_exactly(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        raise HttpError("the response ended early") from None
