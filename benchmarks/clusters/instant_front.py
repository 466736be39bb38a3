"""`python -m benchmarks.clusters.instant_front`: front ends that send canned answers at once.

What a client measures here is the cost of any client on this machine: its own time, a connection,
the kernel and the framing. It is subtracted from what is measured at a coordinator. The process
prints its HTTP and its gRPC port on one line, and ends when it is terminated.
"""

import asyncio
import sys

import grpc
import msgspec
import uvloop

from baton.pb import generation_pb2 as pb
from baton.pb import generation_pb2_grpc

_RESPONSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
)
_LAST_CHUNK = b"0\r\n\r\n"
_END_OF_HEAD = b"\r\n\r\n"  # of a request's head


class _InstantHttpProtocol(asyncio.Protocol):
    """Reads one request and answers it in a single write, with a chunk for each token."""

    def __init__(self) -> None:
        self._read = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, complete, body = self._read.partition(_END_OF_HEAD)
        length = (
            int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
            if complete
            else 1
        )
        if len(body) >= length:
            self._transport.write(
                _RESPONSE_HEAD
                + b"".join(_event_chunks(msgspec.json.decode(body)["max_tokens"]))
                + _LAST_CHUNK
            )
            self._transport.close()


def _event_chunks(tokens: int) -> list[bytes]:
    chunk = msgspec.json.encode(
        {"choices": [{"index": 0, "text": " token", "finish_reason": None}]}
    )
    usage = msgspec.json.encode({"choices": [], "usage": {"completion_tokens": tokens}})
    return [
        _encode_chunk(b"data: " + event + b"\n\n")
        for event in (*[chunk] * tokens, usage, b"[DONE]")
    ]


def _encode_chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


class _InstantGenerationService(generation_pb2_grpc.GenerationServicer):
    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        for token in range(request.max_tokens):
            await context.write(pb.GenerateResponse(token_ids=[token]))


async def serve_forever() -> None:
    """Serve until the process is terminated."""
    http = await asyncio.get_running_loop().create_server(_InstantHttpProtocol, "127.0.0.1", 0)
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServicer_to_server(_InstantGenerationService(), server)
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(http.sockets[0].getsockname()[1], grpc_port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    sys.exit(uvloop.run(serve_forever()))
