"""What ends a call over gRPC with an error keeps nothing of the request."""

import weakref
from typing import Any, NoReturn

import grpc.aio
import pytest

from baton.errors import InvalidRequest
from coordinator.frontend.grpc.errors import grpc_errors


class WeaklyReferencedBody:
    """Stands for the bytes of a request, to which nobody can hold a weak reference."""


class KeepingContext:
    """As gRPC's own: whoever holds the context holds the error that ended the call."""

    def __init__(self) -> None:
        self.error: grpc.aio.AbortError | None = None

    async def abort(self, *_: Any) -> NoReturn:
        self.error = grpc.aio.AbortError("aborted")
        raise self.error


def refuse(error: Exception) -> NoReturn:
    """Raises `error` from a frame that holds a body, behind another error that does, too."""
    body = WeaklyReferencedBody()
    REFERENCES.append(weakref.ref(body))
    try:
        raise ValueError("no message")
    except ValueError:
        raise error from None


REFERENCES: list[weakref.ref[WeaklyReferencedBody]] = []


@pytest.mark.parametrize(
    "error", [InvalidRequest("refused"), ZeroDivisionError("unforeseen")], ids=str
)
async def test_error_of_an_aborted_call_does_not_keep_its_request_alive(error: Exception) -> None:
    context: Any = KeepingContext()
    REFERENCES.clear()
    with pytest.raises(grpc.aio.AbortError) as caught:
        async with grpc_errors(context):
            refuse(error)
    held = context.error
    assert held is caught.value
    (body,) = REFERENCES
    assert body() is None


async def test_an_abort_within_the_block_passes() -> None:
    context: Any = KeepingContext()
    abort = grpc.aio.AbortError("by the block")
    with pytest.raises(grpc.aio.AbortError) as caught:
        async with grpc_errors(context):
            raise abort
    assert caught.value is abort
    assert context.error is None
