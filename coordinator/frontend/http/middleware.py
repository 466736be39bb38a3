"""The outermost layer of both HTTP applications: authentication, request ids, unexpected errors.

It is plain ASGI, because a route needs the server's own `receive` to notice a disconnect.
"""

from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import BatonError
from coordinator.frontend.auth import AdminAuthenticator, ClientAuthenticator, is_origin_allowed
from coordinator.frontend.http import errors
from coordinator.frontend.http.request_body import CLOSE_KEY, REQUEST_ID_KEY, TENANT_KEY
from coordinator.frontend.internal_errors import to_internal_error
from coordinator.frontend.request import RejectionCounter, check_client_request_id

RequestGuard = Callable[[Request], None]  # raises Unauthenticated


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
