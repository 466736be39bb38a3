"""What ends a call over gRPC with an error keeps nothing of the request."""

import weakref
from typing import Any, NoReturn

import grpc.aio
import pytest

from baton.errors import InvalidRequest
from coordinator.grpc_terms import told


class Body:
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
    body = Body()
    REFERENCES.append(weakref.ref(body))
    try:
        raise ValueError("no message")
    except ValueError:
        raise error from None


REFERENCES: list[weakref.ref[Body]] = []


@pytest.mark.parametrize("error", [InvalidRequest("refused"), ZeroDivisionError("unforeseen")], ids=str)
async def test_the_error_of_a_refused_call_does_not_hold_its_request(error: Exception) -> None:
    context: Any = KeepingContext()
    REFERENCES.clear()
    with pytest.raises(grpc.aio.AbortError) as caught:
        async with told(context):
            refuse(error)
    held = context.error
    assert held is caught.value
    (body,) = REFERENCES
    assert body() is None


async def test_an_abort_within_the_block_passes() -> None:
    context: Any = KeepingContext()
    abort = grpc.aio.AbortError("by the block")
    with pytest.raises(grpc.aio.AbortError) as caught:
        async with told(context):
            raise abort
    assert caught.value is abort
    assert context.error is None
