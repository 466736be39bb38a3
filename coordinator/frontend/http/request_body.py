"""What a route needs of its connection: a bounded body, and to be stopped when the client is
gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.types import Receive

from baton.errors import Cancelled, DeadlineExceeded, RequestTooLarge
from baton.limits import BODY_TIMEOUT_SECONDS, MAX_BODY_BYTES, MAX_SMALL_BODY_BYTES
from coordinator.frontend.body_budget import BodyBudgets, IncomingBody
from coordinator.frontend.http.errors import UnsupportedMediaType

CLOSE_KEY = "close"  # where it is left that the connection is to be closed after the response


@asynccontextmanager
async def receive_body(request: Request, limit: float, bodies: BodyBudgets) -> AsyncIterator[bytes]:
    """The whole body, if it comes within `limit` seconds and BODY_SECONDS. Its room is kept while
    the block runs.

    Raises UnsupportedMediaType, TooLarge or Overloaded before it is read, or as soon as it is seen
    to be; also DeadlineExceeded, and Cancelled when the client goes away.
    """
    check_media_type(request)
    declared = _declared_length(request)
    first = (
        MAX_SMALL_BODY_BYTES if declared is None else min(declared, MAX_SMALL_BODY_BYTES)
    )  # may lie in buffers already
    owner = request.client.host if request.client else ""
    async with bodies.get_budget(declared).reserve_body(first, owner) as room:
        body = await _read_body(request, min(limit, BODY_TIMEOUT_SECONDS), room)
        await room.wait_to_decode(len(body))
        yield body


def check_media_type(request: Request) -> None:
    """Raises UnsupportedMediaType for a body that does not say that it is JSON. A web page of
    anywhere may send any body but such a one without asking."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        shown = repr(media_type[:64]) if media_type else "missing"
        raise UnsupportedMediaType(
            f"content-type is {shown}: it must be application/json", param="content-type"
        )


def _declared_length(request: Request) -> int | None:
    """How long the body says that it will be; None if it does not say. Raises TooLarge."""
    declared = request.headers.get("content-length", "")
    if not declared.isdecimal():
        return None
    if int(declared) > MAX_BODY_BYTES:
        raise _too_large(f"{int(declared)} bytes")
    return int(declared)


async def _read_body(request: Request, limit: float, room: IncomingBody) -> bytes:
    body = bytearray()
    state = request.scope["state"]
    state[CLOSE_KEY] = True  # unless all of it is read
    try:
        async with asyncio.timeout(limit) as timer:
            room.start_reading(timer)
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Cancelled(
                        "the client closed the connection before its request was complete"
                    )
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    state[CLOSE_KEY] = (
                        False  # it is read to its end and dropped, so that its client hears of it
                    )
                    raise _too_large(f"more than {MAX_BODY_BYTES} bytes")
                await room.grow_to(len(body))
                if not message.get("more_body", False):
                    room.mark_complete()
                    state[CLOSE_KEY] = False
                    return bytes(body)
    except TimeoutError:
        if room.is_displaced:
            raise room.displaced_error() from None
        raise DeadlineExceeded(f"the body did not arrive within {limit:g} s") from None


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block, and leave it quietly, when the client closes its connection. `receive` is
    its own meanwhile."""
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


def _too_large(size: str) -> RequestTooLarge:
    return RequestTooLarge(f"the body is {size}: the limit is {MAX_BODY_BYTES}")
