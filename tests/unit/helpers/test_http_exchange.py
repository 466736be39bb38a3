"""A client that must tell an answer from half of one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.http_exchange import ConnectionCut, post

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def fixed_answer_server(data: bytes) -> AsyncIterator[tuple[str, int]]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(data)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[:2]
    finally:
        server.close()


async def post_and_read(data: bytes) -> bytes:
    async with fixed_answer_server(data) as address, post(address, "/", {}, {}) as answer:
        assert answer.status == 200
        return await answer.read_body()


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (OK + b"Content-Length: 5\r\n\r\nhello", b"hello"),
        (OK + b"content-length: 0\r\n\r\n", b""),
        (CHUNKED + b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n", b"hello"),
    ],
)
async def test_complete_response_is_read(data: bytes, body: bytes) -> None:
    assert await post_and_read(data) == body


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200", OK, OK + b"content-length: 5\r\n"])
async def test_cut_before_the_response_is_reported(data: bytes) -> None:
    with pytest.raises(ConnectionCut) as cut:
        await post_and_read(data)
    assert not cut.value.is_mid_response


@pytest.mark.parametrize(
    "data",
    [
        OK + b"content-length: 5\r\n\r\nhell",
        CHUNKED,
        CHUNKED + b"5\r\nhell",
        CHUNKED + b"5\r\nhello\r\n",
    ],
)
async def test_cut_in_the_response_is_reported(data: bytes) -> None:
    with pytest.raises(ConnectionCut) as cut:
        await post_and_read(data)
    assert cut.value.is_mid_response


async def test_lines_are_whole_however_chunks_are_cut() -> None:
    pieces = (b"data: a", b"\n\nda", b"ta: b\n", b"\n")
    data = (
        CHUNKED + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    )
    async with fixed_answer_server(data) as address, post(address, "/", {}, {}) as answer:
        assert [line async for line in answer.read_lines()] == [b"data: a", b"", b"data: b", b""]


async def test_refused_connection_is_raised() -> None:
    with pytest.raises(ConnectionRefusedError):
        async with post(("127.0.0.1", 1), "/", {}, {}):
            pass
