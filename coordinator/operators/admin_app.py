"""The admin HTTP port: probes, metrics, and the cluster's state as JSON."""

from typing import Protocol

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.errors import InvalidRequest, NotSupported, ServiceUnavailable
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
from coordinator.frontend.http.app import make_application
from coordinator.frontend.http.metrics_page import build_metrics_route
from coordinator.frontend.http.request_handling import (
    RequestMiddleware,
    check_admin_request,
    receive_body,
)
from coordinator.frontend.http.schema.body_decoder import BodyDecoder, RequestBody
from coordinator.frontend.request import RejectionCounter
from coordinator.readiness import Readiness
from coordinator.text.text_workers import TextWorkers

UNBUILT_ROUTES = (("/", "GET"),)
ADMIN_BODY_TIMEOUT_SECONDS = 10.0


class RatioAdmin(Protocol):
    """What the admin port needs of `RatioOperations`."""

    def get_ratio(self) -> Ratio: ...

    def set_ratio(self, target: RoleSplit, flip_timeout: float | None) -> Ratio: ...

    def advise_ratio(self, slo: Slo | None) -> RatioAdvice: ...

    def set_auto_ratio(self, slo: Slo | None, flip_timeout: float | None) -> Ratio: ...

    def set_manual_ratio(self) -> Ratio: ...


class ClusterAdmin(Protocol):
    """What the admin port needs of `ClusterOperations`."""

    @property
    def ratio(self) -> RatioAdmin: ...

    def get_status(self) -> StatusResponse: ...

    async def collect_ledgers(self) -> LedgerResponse: ...

    def explain_request(self, request: str) -> ExplainResponse: ...

    def drain_node(self, name: str, timeout: float | None) -> DrainResponse: ...

    def undrain_node(self, name: str) -> DrainResponse: ...

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
) -> Starlette:
    authenticator = AdminAuthenticator(admin_token)

    def guard(request: Request) -> None:
        check_admin_request(authenticator, request)

    routes = [
        *_probe_routes(readiness),
        *_view_routes(cluster),
        build_metrics_route(lambda: cluster.render_metrics()),
        _drain_route(cluster),
        *_ratio_routes(cluster),
        *(Route(path, _raise_not_available, methods=[method]) for path, method in UNBUILT_ROUTES),
    ]
    return make_application(
        routes, [Middleware(RequestMiddleware, guard=guard, rejections=rejections)]
    )


def _probe_routes(readiness: Readiness) -> list[Route]:
    async def livez(_: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def readyz(_: Request) -> Response:
        ready, reason = readiness.state()
        if not ready:
            raise ServiceUnavailable(f"not ready: {reason}", retry_after=1.0)
        return JSONResponse({"status": "ready"})

    return [Route("/livez", livez), Route("/readyz", readyz)]


def _view_routes(cluster: ClusterAdmin) -> list[Route]:
    async def status(_: Request) -> Response:
        return _to_json_response(cluster.get_status())

    async def ledger(_: Request) -> Response:
        return _to_json_response(await cluster.collect_ledgers())

    async def explain(request: Request) -> Response:
        return _to_json_response(cluster.explain_request(request.path_params["request_id"]))

    return [
        Route("/admin/explain/{request_id:path}", explain),
        Route("/admin/status", status),
        Route("/admin/ledger", ledger),
    ]


def _drain_route(cluster: ClusterAdmin) -> Route:
    decoder, bodies, workers = BodyDecoder(_DrainBody), BodyBudgets(), TextWorkers()

    async def drain(request: Request) -> Response:
        async with receive_body(request, ADMIN_BODY_TIMEOUT_SECONDS, bodies) as body:
            command = await decoder.decode_body(body, workers)
        if command.undrain:
            return _to_json_response(cluster.undrain_node(command.node))
        return _to_json_response(cluster.drain_node(command.node, command.timeout))

    return Route("/admin/drain", drain, methods=["POST"])


def _ratio_routes(cluster: ClusterAdmin) -> list[Route]:
    decoder, bodies, workers = BodyDecoder(_RatioBody), BodyBudgets(), TextWorkers()

    async def show(_: Request) -> Response:
        return _to_json_response(cluster.ratio.get_ratio())

    async def change(request: Request) -> Response:
        async with receive_body(request, ADMIN_BODY_TIMEOUT_SECONDS, bodies) as body:
            return _to_json_response(
                _change_ratio(cluster.ratio, await decoder.decode_body(body, workers))
            )

    async def advise(request: Request) -> Response:
        slo = request.query_params.get("slo")
        return _to_json_response(cluster.ratio.advise_ratio(parse_slo(slo) if slo else None))

    return [
        Route("/admin/ratio", show),
        Route("/admin/ratio/advice", advise),
        Route("/admin/ratio", change, methods=["POST"]),
    ]


def _change_ratio(ratio: RatioAdmin, body: _RatioBody) -> Ratio:
    """Raises InvalidRequest."""
    if (body.ratio is None) == (body.auto is None):
        raise InvalidRequest("give either ratio, as in 3:1, or auto, true or false", param="ratio")
    if body.slo is not None and not body.auto:
        raise InvalidRequest("slo belongs to auto: true", param="slo")
    if body.ratio is not None:
        return ratio.set_ratio(parse_split(body.ratio), body.flip_timeout)
    if body.auto:
        return ratio.set_auto_ratio(parse_slo(body.slo) if body.slo else None, body.flip_timeout)
    return ratio.set_manual_ratio()


async def _raise_not_available(request: Request) -> Response:
    raise NotSupported(f"{request.method} {request.scope['path']} is not available yet")


def _to_json_response(message: Message) -> Response:
    return JSONResponse(
        MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    )
