"""One HTTP request on a connection of its own, and exactly what comes back on it.

A library would hide what these tests are about: whether the connection ended before, in, or after
an answer, and when precisely the client was gone.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

_LIMIT = 1 << 20  # bytes of a line


class ConnectionCut(Exception):
    """The connection ended. `is_mid_response`: in the middle of an answer, else before it began."""

    def __init__(self, answered: bool) -> None:
        super().__init__("in the answer" if answered else "before the answer")
        self.is_mid_response = answered


class HttpResponse:
    """The head of an answer has been read. Its body is read once, by one of the two ways."""

    def __init__(
        self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader
    ) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def read_body(self) -> bytes:
        """All of it. Raises Cut."""
        return b"".join([piece async for piece in self._read_chunks()])

    async def read_lines(self) -> AsyncIterator[bytes]:
        """As they come, without their ends. Raises Cut unless the body ends as it should."""
        pending = b""
        async for piece in self._read_chunks():
            *whole, pending = (pending + piece).split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r")
        if pending:
            yield pending

    async def _read_chunks(self) -> AsyncIterator[bytes]:
        try:
            if "content-length" in self.headers:
                yield await self._reader.readexactly(int(self.headers["content-length"]))
                return
            assert self.headers.get("transfer-encoding") == "chunked", self.headers
            while size := int(await _read_line(self._reader), 16):
                yield await self._reader.readexactly(size)
                await _read_line(self._reader)
            await _read_line(self._reader)
        except (OSError, asyncio.IncompleteReadError):
            raise ConnectionCut(answered=True) from None


@asynccontextmanager
async def post(
    address: tuple[str, int], path: str, body: Any, headers: Mapping[str, str]
) -> AsyncIterator[HttpResponse]:
    """The answer to a POST of JSON. Leaving the block closes the connection. Raises
    ConnectionRefusedError or Cut."""
    try:
        reader, writer = await asyncio.open_connection(*address, limit=_LIMIT)
    except ConnectionRefusedError:
        raise
    except OSError:
        raise ConnectionCut(answered=False) from None
    try:
        content = json.dumps(body).encode()
        lines = {
            "host": address[0],
            "content-type": "application/json",
            "content-length": str(len(content)),
        }
        lines |= {"connection": "close", **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        try:
            writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
            await writer.drain()
            status = int((await _read_line(reader)).split()[1])
            found = {}
            while line := await _read_line(reader):
                name, _, value = line.decode().partition(":")
                found[name.lower()] = value.strip()
        except (OSError, asyncio.IncompleteReadError):
            raise ConnectionCut(answered=False) from None
        yield HttpResponse(status, found, reader)
    finally:
        writer.close()


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    return (await reader.readuntil(b"\r\n")).removesuffix(b"\r\n")
