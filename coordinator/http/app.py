"""The client-facing HTTP application."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from baton.errors import BatonError
from coordinator.auth import AdminGate, Clients, may_call
from coordinator.http import docs_page, errors, metrics_page, openapi
from coordinator.http.boundary import TENANT, Boundary, answer_head, authorization, check_operator
from coordinator.http.information import add_information
from coordinator.http.routes import add_routes
from coordinator.intake import Intake
from coordinator.readiness import Readiness

PUBLIC = frozenset({"/health", "/ping", "/version", docs_page.PATH, "/openapi.json"}) | docs_page.FILE_PATHS


@dataclass(frozen=True)
class OperatorMetrics:
    """What --metrics-on-http adds: a page for whoever `gate` lets in."""

    render: Callable[[], bytes]
    gate: AdminGate


def build(
    intake: Intake,
    readiness: Readiness,
    who: Clients,
    metrics: OperatorMetrics | None = None,
    origins: frozenset[str] = frozenset(),
) -> FastAPI:
    """`origins` are those whose web pages may call, as browsers name them."""

    def guard(request: Request) -> None:
        path = request.scope["path"]  # not request.url, which the Host header has a part in
        if metrics is not None and path == metrics_page.PATH:
            check_operator(metrics.gate, request)
            return
        if not who.required and not may_call(request.headers.get("origin"), request.headers.get("host", ""), origins):
            raise errors.ForeignOrigin(
                "a web page of another origin calls, and no key is asked for: set --api-key, or name the origin in "
                "--allowed-origins"
            )
        if path not in PUBLIC:
            request.scope["state"][TENANT] = who.identify(authorization(request))

    app = FastAPI(
        title="Baton",
        version=version(),
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,  # a redirect would be built from the Host header, and has no body in OpenAI's shape
    )
    app.add_middleware(Boundary, guard=guard, refusals=intake.refusals)
    if origins:  # the outermost, because a browser asks without the key whether it may send it
        methods, headers = ["GET", "POST"], ["*"]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=headers)
    app.add_exception_handler(BatonError, errors.on_baton_error)
    app.add_exception_handler(HTTPException, errors.on_http_exception)
    add_routes(app, intake, who)
    add_information(app, intake, readiness, app.version)
    docs_page.add_docs(app)
    if metrics is not None:
        metrics_page.add_metrics(app, metrics.render)
    answer_head(app)
    app.openapi = lambda: openapi.document(app.version)  # type: ignore[method-assign]
    return app


def version() -> str:
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
