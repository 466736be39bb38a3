"""A service's methods, put on a server so that bytes which are no message of ours are the caller's
mistake.

What protoc generates for this would answer them with INTERNAL or UNKNOWN, a fault of ours.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from baton.errors import DeadlineExceeded, InvalidRequest
from baton.limits import BODY_TIMEOUT_SECONDS, MAX_BODY_BYTES
from coordinator.frontend.body_budget import BodyBudget, IncomingBody, create_grpc_budget
from coordinator.frontend.grpc.errors import ServicerContext, grpc_errors
from coordinator.frontend.grpc.message_limits import check_field_count


class ServiceMethods(Protocol):
    """A coroutine function for each method of the service. One that streams writes to its
    context."""

    def authenticate(self, context: ServicerContext) -> None:
        """By the call's metadata, before anything is taken for its message. Raises
        Unauthenticated."""
        ...


def add_service_handlers(
    server: grpc.aio.Server,
    service: ServiceDescriptor,
    methods: ServiceMethods,
    room: BodyBudget | None = None,
) -> None:
    """Requests have `room` while they arrive, one of their own unless it is given."""
    handlers, room = {}, create_grpc_budget() if room is None else room
    for method in service.methods:
        streams = method.server_streaming
        make = (
            grpc.stream_stream_rpc_method_handler
            if streams
            else grpc.stream_unary_rpc_method_handler
        )
        handlers[method.name] = make(
            _make_method_handler(methods, method.name, GetMessageClass(method.input_type), room),
            request_deserializer=None,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service.full_name, handlers),)
    )


def _make_method_handler(
    methods: ServiceMethods, name: str, kind: type[Message], room: BodyBudget
) -> Callable[[AsyncIterator[bytes], ServicerContext], Awaitable[Any]]:
    """The server would wait for the one message of a request for ever, and for any number of them.
    So it is taken here, as the first of a stream: on the wire the two are the same."""
    method = getattr(methods, name)

    async def call(messages: AsyncIterator[bytes], context: ServicerContext) -> Any:
        async with grpc_errors(context):
            methods.authenticate(context)
            async with room.reserve_body(MAX_BODY_BYTES, context.peer()) as body:
                data = await _read_message_bytes(context, body)
                await body.wait_to_decode(len(data))
                request = _parse_message(data, kind)
        return await method(request, context)

    return call


async def _read_message_bytes(context: ServicerContext, body: IncomingBody) -> bytes:
    """Raises DeadlineExceeded, Overloaded, InvalidRequest if there is none."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS) as timer:
            body.start_reading(timer)
            data = await context.read()
            if data is grpc.aio.EOF:
                raise InvalidRequest("the call has no message")
            body.mark_complete()
            return cast(bytes, data)
    except TimeoutError:
        if body.is_displaced:
            raise body.displaced_error() from None
        raise DeadlineExceeded(
            f"the request did not arrive within {BODY_TIMEOUT_SECONDS:g} s"
        ) from None


def _parse_message(data: bytes, kind: type[Message]) -> Message:
    """Raises InvalidRequest."""
    check_field_count(data, cast(Descriptor, kind.DESCRIPTOR))
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidRequest(
            f"the message is no {kind.DESCRIPTOR.name}: its bytes cannot be read"
        ) from None
