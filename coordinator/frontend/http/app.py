"""The HTTP application for clients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.errors import BatonError
from baton.version import package_version
from coordinator.frontend.auth import AdminAuthenticator, ClientAuthenticator
from coordinator.frontend.http import docs_page, errors, metrics_page, openapi
from coordinator.frontend.http.generation_endpoints import GenerationEndpoints
from coordinator.frontend.http.info_routes import build_info_routes
from coordinator.frontend.http.request_handling import (
    ClientGuard,
    RequestGuard,
    RequestMiddleware,
    check_admin_request,
)
from coordinator.frontend.request_intake import RequestIntake
from coordinator.readiness import Readiness

PUBLIC_PATHS = (
    frozenset({"/health", "/ping", "/version", docs_page.DOCS_PATH, docs_page.OPENAPI_PATH})
    | docs_page.DOCS_FILE_PATHS
)


@dataclass(frozen=True)
class MetricsEndpoint:
    """The route /metrics of --metrics-on-http, for callers that `authenticator` admits."""

    render_metrics: Callable[[], bytes]
    authenticator: AdminAuthenticator


def build_app(
    intake: RequestIntake,
    readiness: Readiness,
    client_auth: ClientAuthenticator,
    metrics: MetricsEndpoint | None = None,
    allowed_origins: frozenset[str] = frozenset(),
) -> Starlette:
    """Web pages of `allowed_origins` may call, given as browsers send them."""
    guard: RequestGuard = ClientGuard(client_auth, allowed_origins, PUBLIC_PATHS)
    version = package_version()
    routes = [
        *GenerationEndpoints(intake, client_auth).list_routes(),
        *build_info_routes(intake, readiness, version),
        *docs_page.build_docs_routes(),
        _build_openapi_route(version),
    ]
    if metrics is not None:
        routes.append(metrics_page.build_metrics_route(metrics.render_metrics))
        guard = _guard_metrics(metrics.authenticator, guard)
    middleware = [Middleware(RequestMiddleware, guard=guard, rejections=intake.rejections)]
    if allowed_origins:  # outermost, because browsers send preflight requests without the key
        cors = Middleware(
            CORSMiddleware,
            allow_origins=tuple(allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["retry-after", "x-baton-request-id", "x-request-id"],
        )
        middleware.insert(0, cors)
    return make_application(routes, middleware)


def make_application(routes: Sequence[Route], middleware: Sequence[Middleware]) -> Starlette:
    """Make an application that answers every error in OpenAI's format."""
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            BatonError: errors.on_baton_error,
            HTTPException: errors.on_http_exception,
        },
    )
    # A redirect would depend on the Host header, and have no body in OpenAI's format.
    app.router.redirect_slashes = False
    return app


def _guard_metrics(authenticator: AdminAuthenticator, other_paths: RequestGuard) -> RequestGuard:
    """Let only operators read /metrics; `other_paths` guards everything else."""

    def guard(request: Request) -> None:
        if request.scope["path"] == metrics_page.METRICS_PATH:
            check_admin_request(authenticator, request)
        else:
            other_paths(request)

    return guard


def _build_openapi_route(version: str) -> Route:
    async def document(_: Request) -> Response:
        return JSONResponse(openapi.build_openapi_document(version))

    return Route(docs_page.OPENAPI_PATH, document)
