"""What a route needs of its connection: a bounded body, and to be stopped when the client is gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.types import Receive

from baton.errors import Cancelled, DeadlineExceeded, TooLarge
from baton.limits import MAX_BODY_BYTES


async def read_body(request: Request, limit: float) -> bytes:
    """The whole body, if it comes within `limit` seconds.

    Raises TooLarge as soon as it is seen to be, DeadlineExceeded, or Cancelled when the client goes away.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large(f"{int(declared)} bytes")
    body = bytearray()
    try:
        async with asyncio.timeout(limit):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Cancelled("the client closed the connection before its request was complete")
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large(f"more than {MAX_BODY_BYTES} bytes")
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {limit:g} s") from None


@asynccontextmanager
async def stopped_by_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block, and leave it quietly, when the client closes its connection. `receive` is its own meanwhile."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch(), name="watch for disconnect")
    try:
        yield
    except asyncio.CancelledError:
        if not gone or task.uncancel() > 0:
            raise
    finally:
        watcher.cancel()


def _too_large(size: str) -> TooLarge:
    return TooLarge(f"the body is {size}: the limit is {MAX_BODY_BYTES}")
