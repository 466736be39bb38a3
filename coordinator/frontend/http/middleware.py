"""The outermost layer of both HTTP applications: authentication, request ids, unexpected errors.

It is plain ASGI, because a route needs the server's own `receive` to notice a disconnect.
"""

from collections.abc import Callable

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import BatonError
from coordinator.frontend.auth import AdminAuthenticator
from coordinator.frontend.http import errors
from coordinator.frontend.http.request_body import CLOSE_KEY
from coordinator.frontend.internal_errors import to_internal_error
from coordinator.frontend.rejections import RejectionCounter
from coordinator.frontend.request import check_client_request_id

TENANT_KEY = "tenant"  # of the request's state: the tenant of the caller, set by the guard
# Of the request's state: the id for the header of the response, also of an error; set by a route.
REQUEST_ID_KEY = "request_id"
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


def allow_head_requests(app: FastAPI) -> None:
    """Make every GET route answer HEAD, too. The server leaves the body out."""
    for route in app.routes:
        if isinstance(route, Route) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")


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
