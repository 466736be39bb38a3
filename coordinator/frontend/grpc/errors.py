"""What every gRPC service of the coordinator shares: how errors are told, and who may call."""

import math
import urllib.parse
from types import TracebackType
from typing import NoReturn, TypeAlias

import grpc
import grpc.aio

from baton.errors import BatonError
from coordinator.frontend.auth import AdminAuthenticator
from coordinator.frontend.internal_errors import to_internal_error

ServicerContext: TypeAlias = grpc.aio.ServicerContext
ERROR_CODE, ERROR_PARAM, RETRY_AFTER = "baton-error-code", "baton-error-param", "retry-after"


class grpc_errors:
    """Any error of the block ends the call with its code; details are in the trailing metadata."""

    def __init__(self, context: ServicerContext) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, grpc.aio.AbortError):
            return
        reported = error if isinstance(error, BatonError) else to_internal_error(error)
        del trace
        _clear_tracebacks(error)
        await abort_call(self._context, reported)


def _clear_tracebacks(error: BaseException) -> None:
    """Drop what an error and those before it hold of the frames that they passed: gRPC keeps the
    error of a call that was aborted in a cycle, and the frames hold the whole request."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__context__


async def abort_call(context: ServicerContext, error: BatonError) -> NoReturn:
    trailing = [(ERROR_CODE, error.code)]
    if error.param:
        trailing.append((ERROR_PARAM, error.param))
    if error.retry_after is not None:
        trailing.append((RETRY_AFTER, str(max(1, math.ceil(error.retry_after)))))
    await context.abort(grpc.StatusCode[error.grpc_code], error.message, tuple(trailing))
    raise AssertionError("abort returned")


def get_metadata(context: ServicerContext, key: str) -> str | None:
    """The first value of a text key that the caller sent."""
    return next(
        (str(value) for name, value in context.invocation_metadata() or () if name == key), None
    )


def get_authorization(context: ServicerContext) -> bytes | None:
    value = get_metadata(context, "authorization")
    return None if value is None else value.encode()


def check_admin_call(context: ServicerContext, gate: AdminAuthenticator) -> None:
    """Raises Unauthenticated unless the caller may administer this cluster."""
    gate.check_caller(parse_peer_address(context.peer()), get_authorization(context))
    gate.check_not_proxied(str(name) for name, _ in context.invocation_metadata() or ())


def parse_peer_address(peer: str) -> str | None:
    """The IP address in gRPC's name of a peer: ipv4:127.0.0.1:5, or ipv6:%5B::1%5D:5."""
    kind, _, rest = peer.partition(":")
    host, _, _ = urllib.parse.unquote(rest).rpartition(":")
    return host.strip("[]") if kind in ("ipv4", "ipv6") and host else None
