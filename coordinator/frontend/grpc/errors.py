"""Errors, metadata and authentication, for all gRPC services of the coordinator."""

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
    """Ends the call with the code of any error of the block; trailing metadata has the details."""

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
    """Drop the tracebacks of an error and of its context.

    gRPC keeps the error of an aborted call in a reference cycle, and the frames of its traceback
    hold the whole request.
    """
    current: BaseException | None = error
    while current is not None:
        current.__traceback__ = None
        current = current.__context__


async def abort_call(context: ServicerContext, error: BatonError) -> NoReturn:
    """End the call with the error's status, and its details in the trailing metadata."""
    trailing = [(ERROR_CODE, error.code)]
    if error.param:
        trailing.append((ERROR_PARAM, error.param))
    if error.retry_after is not None:
        trailing.append((RETRY_AFTER, str(max(1, math.ceil(error.retry_after)))))
    await context.abort(grpc.StatusCode[error.grpc_code], error.message, tuple(trailing))
    raise AssertionError("abort returned")


def get_metadata(context: ServicerContext, key: str) -> str | None:
    """Return the first value of a key of the caller's metadata."""
    return next(
        (str(value) for name, value in context.invocation_metadata() or () if name == key), None
    )


def get_authorization(context: ServicerContext) -> bytes | None:
    value = get_metadata(context, "authorization")
    return None if value is None else value.encode()


def check_admin_call(context: ServicerContext, authenticator: AdminAuthenticator) -> None:
    """Raises Unauthenticated unless the caller may administer this cluster."""
    authenticator.check_caller(parse_peer_address(context.peer()), get_authorization(context))
    authenticator.check_not_proxied(str(name) for name, _ in context.invocation_metadata() or ())


def parse_peer_address(peer: str) -> str | None:
    """Return the IP address in the name of a peer: ipv4:127.0.0.1:5, or ipv6:%5B::1%5D:5."""
    kind, _, rest = peer.partition(":")
    host, _, _ = urllib.parse.unquote(rest).rpartition(":")
    return host.strip("[]") if kind in ("ipv4", "ipv6") and host else None
