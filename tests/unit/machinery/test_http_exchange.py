"""A client that must tell an answer from half of one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.http_exchange import Cut, post

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def answering(data: bytes) -> AsyncIterator[tuple[str, int]]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(data)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[:2]
    finally:
        server.close()


async def asked(data: bytes) -> bytes:
    async with answering(data) as address, post(address, "/", {}, {}) as answer:
        assert answer.status == 200
        return await answer.body()


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (OK + b"Content-Length: 5\r\n\r\nhello", b"hello"),
        (OK + b"content-length: 0\r\n\r\n", b""),
        (CHUNKED + b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n", b"hello"),
    ],
)
async def test_a_whole_answer(data: bytes, body: bytes) -> None:
    assert await asked(data) == body


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200", OK, OK + b"content-length: 5\r\n"])
async def test_no_answer(data: bytes) -> None:
    with pytest.raises(Cut) as cut:
        await asked(data)
    assert not cut.value.answered


@pytest.mark.parametrize(
    "data", [OK + b"content-length: 5\r\n\r\nhell", CHUNKED, CHUNKED + b"5\r\nhell", CHUNKED + b"5\r\nhello\r\n"]
)
async def test_half_an_answer(data: bytes) -> None:
    with pytest.raises(Cut) as cut:
        await asked(data)
    assert cut.value.answered


async def test_lines_come_whole_however_they_are_cut() -> None:
    pieces = (b"data: a", b"\n\nda", b"ta: b\n", b"\n")
    data = CHUNKED + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    async with answering(data) as address, post(address, "/", {}, {}) as answer:
        assert [line async for line in answer.lines()] == [b"data: a", b"", b"data: b", b""]


async def test_nobody_there() -> None:
    with pytest.raises(ConnectionRefusedError):
        async with post(("127.0.0.1", 1), "/", {}, {}):
            pass
