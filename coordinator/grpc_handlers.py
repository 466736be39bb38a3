"""A service's methods, put on a server so that bytes which are no message of ours are the caller's mistake.

What protoc generates for this would answer them with INTERNAL or UNKNOWN, a fault of ours.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from baton.errors import InvalidRequest
from coordinator.grpc_terms import Context, abort


def add_handlers(server: grpc.aio.Server, service: ServiceDescriptor, methods: object) -> None:
    """`methods` has a coroutine function for each method of the service. One that streams writes to its context."""
    handlers = {}
    for method in service.methods:
        streams = method.server_streaming
        make = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = make(
            _parsed(getattr(methods, method.name), GetMessageClass(method.input_type)),
            request_deserializer=None,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _parsed(method: Callable[[Any, Context], Awaitable[Any]], kind: type[Message]) -> Callable[..., Awaitable[Any]]:
    async def call(data: bytes, context: Context) -> Any:
        try:
            request = kind.FromString(data)
        except DecodeError:
            await abort(context, InvalidRequest(f"the message is no {kind.DESCRIPTOR.name}: its bytes cannot be read"))
        return await method(request, context)

    return call
