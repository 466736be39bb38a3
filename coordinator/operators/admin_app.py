"""The admin HTTP port: probes, metrics, and the cluster's state as JSON."""

from typing import Protocol

from fastapi import FastAPI
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from baton.errors import BatonError, InvalidRequest, NotSupported, ServiceUnavailable
from baton.pb.cluster_pb2 import (
    DrainResponse,
    ExplainResponse,
    LedgerResponse,
    Ratio,
    RatioAdvice,
    StatusResponse,
)
from baton.role_split import RoleSplit, parse_split
from baton.slo import Slo, parse_slo
from coordinator.frontend.auth import AdminAuthenticator
from coordinator.frontend.body_budget import BodyBudgets
from coordinator.frontend.http import errors
from coordinator.frontend.http.metrics_page import add_metrics_route
from coordinator.frontend.http.middleware import (
    RequestMiddleware,
    allow_head_requests,
    check_admin_request,
)
from coordinator.frontend.http.request_body import receive_body
from coordinator.frontend.http.schema.body_decoder import BodyDecoder, RequestBody
from coordinator.frontend.rejections import RejectionCounter
from coordinator.readiness import Readiness
from coordinator.text.text_workers import TextWorkers

UNBUILT_ROUTES = (("/", "GET"),)
ADMIN_BODY_TIMEOUT_SECONDS = 10.0


class ClusterAdmin(Protocol):
    """What the admin port needs of `ClusterOperations`."""

    def get_status(self) -> StatusResponse: ...

    async def collect_ledgers(self) -> LedgerResponse: ...

    def explain_request(self, request: str) -> ExplainResponse: ...

    def drain_node(self, name: str, timeout: float | None) -> DrainResponse: ...

    def undrain_node(self, name: str) -> DrainResponse: ...

    def get_ratio(self) -> Ratio: ...

    def set_ratio(self, target: RoleSplit, flip_timeout: float | None) -> Ratio: ...

    def advise_ratio(self, slo: Slo | None) -> RatioAdvice: ...

    def set_auto_ratio(self, slo: Slo | None, flip_timeout: float | None) -> Ratio: ...

    def set_manual_ratio(self) -> Ratio: ...

    def render_metrics(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        ...


class _DrainBody(RequestBody, frozen=True, kw_only=True):
    """The body of POST /admin/drain."""

    node: str
    undrain: bool = False
    timeout: float | None = None  # seconds


class _RatioBody(RequestBody, frozen=True, kw_only=True):
    """The body of POST /admin/ratio: either `ratio` or `auto`."""

    ratio: str | None = None  # prefill to decode nodes, as P:D
    auto: bool | None = None
    slo: str | None = None
    flip_timeout: float | None = None  # seconds


def build_admin_app(
    cluster: ClusterAdmin, readiness: Readiness, admin_token: str, rejections: RejectionCounter
) -> FastAPI:
    authenticator = AdminAuthenticator(admin_token)

    def guard(request: Request) -> None:
        check_admin_request(authenticator, request)

    app = FastAPI(
        title="Baton admin", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.add_middleware(RequestMiddleware, guard=guard, rejections=rejections)
    app.add_exception_handler(BatonError, errors.on_baton_error)
    app.add_exception_handler(HTTPException, errors.on_http_exception)
    _add_probes(app, readiness)
    _add_views(app, cluster)
    _add_drain_route(app, cluster)
    _add_ratio_routes(app, cluster)
    for path, method in UNBUILT_ROUTES:
        app.add_api_route(path, _raise_not_available, methods=[method])
    allow_head_requests(app)
    return app


def _add_probes(app: FastAPI, readiness: Readiness) -> None:
    async def livez() -> Response:
        return JSONResponse({"status": "alive"})

    async def readyz() -> Response:
        ready, reason = readiness.state()
        if not ready:
            raise ServiceUnavailable(f"not ready: {reason}", retry_after=1.0)
        return JSONResponse({"status": "ready"})

    app.add_api_route("/livez", livez, methods=["GET"])
    app.add_api_route("/readyz", readyz, methods=["GET"])


def _add_views(app: FastAPI, cluster: ClusterAdmin) -> None:
    async def status() -> Response:
        return _to_json_response(cluster.get_status())

    async def ledger() -> Response:
        return _to_json_response(await cluster.collect_ledgers())

    async def explain(request_id: str) -> Response:
        return _to_json_response(cluster.explain_request(request_id))

    app.add_api_route("/admin/explain/{request_id:path}", explain, methods=["GET"])
    add_metrics_route(app, lambda: cluster.render_metrics())
    app.add_api_route("/admin/status", status, methods=["GET"])
    app.add_api_route("/admin/ledger", ledger, methods=["GET"])


def _add_drain_route(app: FastAPI, cluster: ClusterAdmin) -> None:
    decoder, bodies, workers = BodyDecoder(_DrainBody), BodyBudgets(), TextWorkers()

    async def drain(request: Request) -> Response:
        async with receive_body(request, ADMIN_BODY_TIMEOUT_SECONDS, bodies) as body:
            command = await decoder.decode_body(body, workers)
        if command.undrain:
            return _to_json_response(cluster.undrain_node(command.node))
        return _to_json_response(cluster.drain_node(command.node, command.timeout))

    app.add_api_route("/admin/drain", drain, methods=["POST"])


def _add_ratio_routes(app: FastAPI, cluster: ClusterAdmin) -> None:
    decoder, bodies, workers = BodyDecoder(_RatioBody), BodyBudgets(), TextWorkers()

    async def show() -> Response:
        return _to_json_response(cluster.get_ratio())

    async def change(request: Request) -> Response:
        async with receive_body(request, ADMIN_BODY_TIMEOUT_SECONDS, bodies) as body:
            return _to_json_response(
                _change_ratio(cluster, await decoder.decode_body(body, workers))
            )

    async def advise(request: Request) -> Response:
        slo = request.query_params.get("slo")
        return _to_json_response(cluster.advise_ratio(parse_slo(slo) if slo else None))

    app.add_api_route("/admin/ratio", show, methods=["GET"])
    app.add_api_route("/admin/ratio/advice", advise, methods=["GET"])
    app.add_api_route("/admin/ratio", change, methods=["POST"])


def _change_ratio(cluster: ClusterAdmin, body: _RatioBody) -> Ratio:
    """Raises InvalidRequest."""
    if (body.ratio is None) == (body.auto is None):
        raise InvalidRequest("give either ratio, as in 3:1, or auto, true or false", param="ratio")
    if body.slo is not None and not body.auto:
        raise InvalidRequest("slo belongs to auto: true", param="slo")
    if body.ratio is not None:
        return cluster.set_ratio(parse_split(body.ratio), body.flip_timeout)
    if body.auto:
        return cluster.set_auto_ratio(parse_slo(body.slo) if body.slo else None, body.flip_timeout)
    return cluster.set_manual_ratio()


async def _raise_not_available(request: Request) -> Response:
    raise NotSupported(f"{request.method} {request.scope['path']} is not available yet")


def _to_json_response(message: Message) -> Response:
    return JSONResponse(
        MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    )
