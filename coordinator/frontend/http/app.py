"""The HTTP application for clients."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from baton.errors import BatonError
from coordinator.frontend.auth import AdminAuthenticator, ClientAuthenticator, is_origin_allowed
from coordinator.frontend.http import docs_page, errors, metrics_page, openapi
from coordinator.frontend.http.generation_routes import add_generation_routes
from coordinator.frontend.http.info_routes import add_info_routes
from coordinator.frontend.http.middleware import (
    TENANT_KEY,
    RequestMiddleware,
    allow_head_requests,
    check_admin_request,
    get_authorization,
)
from coordinator.frontend.request_intake import RequestIntake
from coordinator.readiness import Readiness

PUBLIC_PATHS = (
    frozenset({"/health", "/ping", "/version", docs_page.DOCS_PATH, "/openapi.json"})
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
) -> FastAPI:
    """Web pages of `allowed_origins` may call, given as browsers send them."""

    def guard(request: Request) -> None:
        path = request.scope["path"]  # not request.url, which depends on the Host header
        if metrics is not None and path == metrics_page.METRICS_PATH:
            check_admin_request(metrics.authenticator, request)
            return
        if not client_auth.is_key_required and not is_origin_allowed(
            request.headers.get("origin"), request.headers.get("host", ""), allowed_origins
        ):
            raise errors.ForeignOrigin(
                "the call is from a web page of another origin, and no key is required: "
                "set --api-key, or name the origin in --allowed-origins"
            )
        if path not in PUBLIC_PATHS:
            request.scope["state"][TENANT_KEY] = client_auth.identify_tenant(
                get_authorization(request)
            )

    app = FastAPI(
        title="Baton",
        version=package_version(),
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        # A redirect would depend on the Host header, and have no body in OpenAI's format.
        redirect_slashes=False,
    )
    app.add_middleware(RequestMiddleware, guard=guard, rejections=intake.rejections)
    if allowed_origins:  # outermost, because browsers send preflight requests without the key
        methods, headers = ["GET", "POST"], ["*"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=methods,
            allow_headers=headers,
        )
    app.add_exception_handler(BatonError, errors.on_baton_error)
    app.add_exception_handler(HTTPException, errors.on_http_exception)
    add_generation_routes(app, intake, client_auth)
    add_info_routes(app, intake, readiness, app.version)
    docs_page.add_docs_routes(app)
    if metrics is not None:
        metrics_page.add_metrics_route(app, metrics.render_metrics)
    allow_head_requests(app)
    app.openapi = lambda: openapi.build_openapi_document(app.version)  # type: ignore[method-assign]
    return app


def package_version() -> str:
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
