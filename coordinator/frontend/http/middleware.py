"""The outermost layer of both HTTP applications: authentication, the client's own request id, and
defects.

Plain ASGI, because a route must see the server's own `receive` to learn of a disconnect.
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

TENANT_KEY = "tenant"  # where the guard leaves who calls
# where a route leaves the id that the response shall carry, whether it ends well or not
REQUEST_ID_KEY = "request_id"
RequestGuard = Callable[[Request], None]  # raises Unauthenticated


def get_authorization(request: Request) -> bytes | None:
    """As it was sent: header text is Latin-1 here, whatever the client meant."""
    value = request.headers.get("authorization")
    return None if value is None else value.encode("latin-1")


def check_admin_request(gate: AdminAuthenticator, request: Request) -> None:
    """Who may see what is for operators. Raises Unauthenticated."""
    gate.check_caller(request.client.host if request.client else None, get_authorization(request))
    gate.check_not_proxied(request.headers.keys())
    gate.check_same_origin(request.headers.get("host", ""), request.headers.get("origin"))


def allow_head_requests(app: FastAPI) -> None:
    """Let every route that answers GET answer HEAD too. The server leaves the body out."""
    for route in app.routes:
        if isinstance(route, Route) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")


class RequestMiddleware:
    def __init__(self, app: ASGIApp, guard: RequestGuard, refusals: RejectionCounter) -> None:
        self._app = app
        self._guard = guard
        self._rejections = refusals

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
            told = error if isinstance(error, BatonError) else to_internal_error(error)
            if started:
                raise told from None
            await errors.error_response(told)(scope, receive, sender)
