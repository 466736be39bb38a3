"""What HTTP requests pass through before their routes: authentication, request ids, errors, bodies.

The middleware is plain ASGI, because a route needs the server's own `receive` to notice a
disconnect. Bodies are received within bounds, and a request is cancelled when its client
disconnects.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import BatonError, Cancelled, DeadlineExceeded, RequestTooLarge
from baton.limits import BODY_TIMEOUT_SECONDS, MAX_BODY_BYTES, MAX_SMALL_BODY_BYTES
from coordinator.core.admission.tenants import Tenant
from coordinator.frontend.auth import AdminAuthenticator, ClientAuthenticator, is_origin_allowed
from coordinator.frontend.body_budget import BodyBudgets, IncomingBody
from coordinator.frontend.http import errors
from coordinator.frontend.http.errors import UnsupportedMediaType
from coordinator.frontend.internal_errors import to_internal_error
from coordinator.frontend.request import RejectionCounter, check_client_request_id

# Keys of a request's state.
TENANT_KEY = "tenant"  # the tenant of the caller, set before its route is called
REQUEST_ID_KEY = "request_id"  # for the header of the response, also of an error; set by a route
CLOSE_KEY = "close"  # whether to close the connection after the response

RequestGuard = Callable[[Request], None]  # raises Unauthenticated


def get_tenant(request: Request) -> Tenant:
    """Return the tenant of the caller, on the port where callers have one."""
    tenant: Tenant = request.scope["state"][TENANT_KEY]
    return tenant


@asynccontextmanager
async def receive_body(
    request: Request, timeout_seconds: float, budgets: BodyBudgets
) -> AsyncIterator[bytes]:
    """Yield the complete body; its room in the budget is kept while the block runs.

    The body must arrive within `timeout_seconds` and BODY_TIMEOUT_SECONDS. Raises
    UnsupportedMediaType, RequestTooLarge or Overloaded, before the body is read if possible;
    DeadlineExceeded; and Cancelled when the client disconnects.
    """
    check_media_type(request)
    declared = _declared_length(request)
    # So many bytes may be in buffers already.
    buffered = MAX_SMALL_BODY_BYTES if declared is None else min(declared, MAX_SMALL_BODY_BYTES)
    client = request.client.host if request.client else ""
    async with budgets.get_budget(declared).reserve_body(buffered, client) as incoming:
        body = await _read_body(request, min(timeout_seconds, BODY_TIMEOUT_SECONDS), incoming)
        await incoming.wait_to_decode(len(body))
        yield body


def check_media_type(request: Request) -> None:
    """Raises UnsupportedMediaType for a body that is not declared as JSON.

    Browsers send other types for any web page without a preflight request.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        shown = repr(media_type[:64]) if media_type else "missing"
        raise UnsupportedMediaType(
            f"content-type is {shown}: it must be application/json", param="content-type"
        )


def _declared_length(request: Request) -> int | None:
    """Return the declared length of the body, or None. Raises RequestTooLarge."""
    declared = request.headers.get("content-length", "")
    if not declared.isdecimal():
        return None
    if int(declared) > MAX_BODY_BYTES:
        raise _too_large(f"{int(declared)} bytes")
    return int(declared)


async def _read_body(request: Request, seconds: float, incoming: IncomingBody) -> bytes:
    body = bytearray()
    state = request.scope["state"]
    state[CLOSE_KEY] = True  # unless the whole body is read
    try:
        async with asyncio.timeout(seconds) as timer:
            incoming.start_reading(timer)
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Cancelled(
                        "the client closed the connection before its request was complete"
                    )
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    # The rest is read and dropped, so that the client receives the error.
                    state[CLOSE_KEY] = False
                    raise _too_large(f"more than {MAX_BODY_BYTES} bytes")
                await incoming.grow_to(len(body))
                if not message.get("more_body", False):
                    incoming.mark_complete()
                    state[CLOSE_KEY] = False
                    return bytes(body)
    except TimeoutError:
        if incoming.is_displaced:
            raise incoming.displaced_error() from None
        raise DeadlineExceeded(f"the body did not arrive within {seconds:g} s") from None


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block, without an error, when the client closes its connection.

    Nothing else may call `receive` meanwhile.
    """
    task = asyncio.current_task()
    assert task is not None
    is_disconnected = False

    async def watch() -> None:
        nonlocal is_disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        is_disconnected = True
        task.cancel()

    watcher = asyncio.create_task(watch(), name="watch for disconnect")
    try:
        yield
    except asyncio.CancelledError:
        if not is_disconnected or task.uncancel() > 0:
            raise
    finally:
        watcher.cancel()


def _too_large(size: str) -> RequestTooLarge:
    return RequestTooLarge(f"the body is {size}: the limit is {MAX_BODY_BYTES}")


def get_authorization(request: Request) -> bytes | None:
    """Return the header as it was sent: Starlette decodes headers as Latin-1."""
    value = request.headers.get("authorization")
    return None if value is None else value.encode("latin-1")


def check_admin_request(authenticator: AdminAuthenticator, request: Request) -> None:
    """Raises Unauthenticated unless the caller may administer this cluster."""
    peer = request.client.host if request.client else None
    authenticator.check_caller(peer, get_authorization(request))
    authenticator.check_not_proxied(request.headers.keys())
    authenticator.check_same_origin(request.headers.get("host", ""), request.headers.get("origin"))


class ClientGuard:
    """Authenticates the callers of the clients' port, and notes each one's tenant."""

    def __init__(
        self,
        client_auth: ClientAuthenticator,
        allowed_origins: frozenset[str],
        public_paths: frozenset[str],
    ) -> None:
        """Web pages of `allowed_origins` may call. `public_paths` need no key."""
        self._client_auth = client_auth
        self._allowed_origins = allowed_origins
        self._public_paths = public_paths

    def __call__(self, request: Request) -> None:
        """Raises Unauthenticated or ForeignOrigin."""
        if not self._client_auth.is_key_required and not is_origin_allowed(
            request.headers.get("origin"), request.headers.get("host", ""), self._allowed_origins
        ):
            raise errors.ForeignOrigin(
                "the call is from a web page of another origin, and no key is required: "
                "set --api-key, or name the origin in --allowed-origins"
            )
        # not request.url, which depends on the Host header
        if request.scope["path"] not in self._public_paths:
            tenant = self._client_auth.identify_tenant(get_authorization(request))
            request.scope["state"][TENANT_KEY] = tenant


class RequestMiddleware:
    """Authenticates each request, adds headers to its response and handles its errors."""

    def __init__(self, app: ASGIApp, guard: RequestGuard, rejections: RejectionCounter) -> None:
        self._app = app
        self._guard = guard
        self._rejections = rejections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        state = scope.setdefault("state", {})
        started = False
        echoed: str | None = None

        async def sender(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                if echoed is not None:
                    headers["x-request-id"] = echoed
                if state.get(CLOSE_KEY):
                    headers["connection"] = "close"
                if REQUEST_ID_KEY in state:
                    headers["x-baton-request-id"] = state[REQUEST_ID_KEY]
            await send(message)

        try:
            with self._rejections.count_rejections():
                self._guard(request)
                echoed = check_client_request_id(request.headers.get("x-request-id"))
            await self._app(scope, receive, sender)
        except Exception as error:
            client_error = error if isinstance(error, BatonError) else to_internal_error(error)
            if started:
                raise client_error from None
            await errors.error_response(client_error)(scope, receive, sender)
