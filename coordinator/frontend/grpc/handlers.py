"""Registers a service's methods so that malformed messages are errors of the caller.

The handlers that protoc generates would answer them with INTERNAL or UNKNOWN, as if the server had
failed. These handlers also authenticate, and bound the bytes that arrive, before they parse.
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
    """Has a coroutine function for each method of the service.

    A method that streams its response writes to its context.
    """

    def authenticate(self, context: ServicerContext) -> None:
        """Check the call's metadata before its message is read. Raises Unauthenticated."""
        ...


def add_service_handlers(
    server: grpc.aio.Server,
    service: ServiceDescriptor,
    methods: ServiceMethods,
    budget: BodyBudget | None = None,
) -> None:
    """Arriving requests share `budget`, by default one of this service alone."""
    handlers, budget = {}, create_grpc_budget() if budget is None else budget
    for method in service.methods:
        streams = method.server_streaming
        make = (
            grpc.stream_stream_rpc_method_handler
            if streams
            else grpc.stream_unary_rpc_method_handler
        )
        handlers[method.name] = make(
            _make_method_handler(methods, method.name, GetMessageClass(method.input_type), budget),
            request_deserializer=None,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service.full_name, handlers),)
    )


def _make_method_handler(
    methods: ServiceMethods, name: str, message_type: type[Message], budget: BodyBudget
) -> Callable[[AsyncIterator[bytes], ServicerContext], Awaitable[Any]]:
    """Read the request's message as the first one of a stream, which is the same on the wire.

    gRPC's own unary handler would wait for the message without any bound.
    """
    method = getattr(methods, name)

    async def call(messages: AsyncIterator[bytes], context: ServicerContext) -> Any:
        async with grpc_errors(context):
            methods.authenticate(context)
            async with budget.reserve_body(MAX_BODY_BYTES, context.peer()) as body:
                data = await _read_message_bytes(context, body)
                await body.wait_to_decode(len(data))
                request = _parse_message(data, message_type)
        return await method(request, context)

    return call


async def _read_message_bytes(context: ServicerContext, body: IncomingBody) -> bytes:
    """Raises InvalidRequest if the call has no message, DeadlineExceeded or Overloaded."""
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


def _parse_message(data: bytes, message_type: type[Message]) -> Message:
    """Raises InvalidRequest."""
    check_field_count(data, cast(Descriptor, message_type.DESCRIPTOR))
    try:
        return message_type.FromString(data)
    except DecodeError:
        raise InvalidRequest(
            f"the message is no {message_type.DESCRIPTOR.name}: its bytes cannot be read"
        ) from None
