"""A server of POST /v1/completions that answers with token ids. Run as a process of its own.

`python -m tests.unit.benchmarks.peers.token_server` prints its port.
"""

import asyncio
import json

_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
_MODELS = json.dumps({"data": [{"id": "m"}]})


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    if head.startswith("GET"):
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(_MODELS)}\r\n\r\n{_MODELS}".encode())
    else:
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        count = json.loads(await reader.readexactly(length))["max_tokens"]
        writer.write(_HEAD.encode())
        for number in range(count):
            choice = {"text": "t", "token_ids": [number]}
            writer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            await writer.drain()
            await asyncio.sleep(0)
        usage = {"choices": [], "usage": {"completion_tokens": count}}
        writer.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
    await writer.drain()
    writer.close()


async def main() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
