"""The admin HTTP port: probes, metrics, and the cluster's state as JSON."""

from typing import Protocol

from fastapi import FastAPI
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from baton.errors import BatonError, InvalidRequest, NotAvailable, Unavailable
from baton.pb.cluster_pb2 import DrainResponse, ExplainResponse, LedgerResponse, Ratio, RatioAdvice, StatusResponse
from baton.ratio import Split, parse_split
from baton.slo import Slo, parse_slo
from coordinator.arriving_bodies import ArrivingBodies
from coordinator.auth import AdminGate
from coordinator.http import errors
from coordinator.http.boundary import Boundary, answer_head, check_operator
from coordinator.http.connection import arriving
from coordinator.http.decoding import Body, Decoder
from coordinator.http.metrics_page import add_metrics
from coordinator.readiness import Readiness
from coordinator.refusals import Refusals
from coordinator.text_workers import TextWorkers

NOT_YET = (("/", "GET"),)
BODY_TIMEOUT = 10.0  # seconds


class ClusterView(Protocol):
    """What this port shows of the whole, and may change."""

    def status(self) -> StatusResponse: ...

    async def ledger(self) -> LedgerResponse: ...

    def explain(self, request: str) -> ExplainResponse: ...

    def drain(self, name: str, timeout: float | None) -> DrainResponse: ...

    def undrain(self, name: str) -> DrainResponse: ...

    def ratio(self) -> Ratio: ...

    def set_ratio(self, target: Split, patience: float | None) -> Ratio: ...

    def advise_ratio(self, slo: Slo | None) -> RatioAdvice: ...

    def auto_ratio(self, slo: Slo | None, patience: float | None) -> Ratio: ...

    def manual_ratio(self) -> Ratio: ...

    def metrics(self) -> bytes:
        """In Prometheus' text format."""
        ...


class _Drain(Body, frozen=True, kw_only=True):
    """The body of POST /admin/drain. `timeout` in seconds."""

    node: str
    undrain: bool = False
    timeout: float | None = None


class _SetRatio(Body, frozen=True, kw_only=True):
    """The body of POST /admin/ratio: `ratio` as P:D, or `auto`. `flip_timeout` in seconds."""

    ratio: str | None = None
    auto: bool | None = None
    slo: str | None = None
    flip_timeout: float | None = None


def build(cluster: ClusterView, readiness: Readiness, admin_token: str, refusals: Refusals) -> FastAPI:
    gate = AdminGate(admin_token)

    def guard(request: Request) -> None:
        check_operator(gate, request)

    app = FastAPI(title="Baton admin", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(Boundary, guard=guard, refusals=refusals)
    app.add_exception_handler(BatonError, errors.on_baton_error)
    app.add_exception_handler(HTTPException, errors.on_http_exception)
    _add_probes(app, readiness)
    _add_views(app, cluster)
    _add_drain(app, cluster)
    _add_ratio(app, cluster)
    for path, method in NOT_YET:
        app.add_api_route(path, _not_yet, methods=[method])
    answer_head(app)
    return app


def _add_probes(app: FastAPI, readiness: Readiness) -> None:
    async def livez() -> Response:
        return JSONResponse({"status": "alive"})

    async def readyz() -> Response:
        ready, reason = readiness.state()
        if not ready:
            raise Unavailable(f"not ready: {reason}", retry_after=1.0)
        return JSONResponse({"status": "ready"})

    app.add_api_route("/livez", livez, methods=["GET"])
    app.add_api_route("/readyz", readyz, methods=["GET"])


def _add_views(app: FastAPI, cluster: ClusterView) -> None:
    async def status() -> Response:
        return _json(cluster.status())

    async def ledger() -> Response:
        return _json(await cluster.ledger())

    async def explain(request_id: str) -> Response:
        return _json(cluster.explain(request_id))

    app.add_api_route("/admin/explain/{request_id:path}", explain, methods=["GET"])
    add_metrics(app, lambda: cluster.metrics())
    app.add_api_route("/admin/status", status, methods=["GET"])
    app.add_api_route("/admin/ledger", ledger, methods=["GET"])


def _add_drain(app: FastAPI, cluster: ClusterView) -> None:
    decoder, bodies, workers = Decoder(_Drain), ArrivingBodies(), TextWorkers()

    async def drain(request: Request) -> Response:
        async with arriving(request, BODY_TIMEOUT, bodies) as body:
            wanted = await decoder.decode(body, workers)
        done = cluster.undrain(wanted.node) if wanted.undrain else cluster.drain(wanted.node, wanted.timeout)
        return _json(done)

    app.add_api_route("/admin/drain", drain, methods=["POST"])


def _add_ratio(app: FastAPI, cluster: ClusterView) -> None:
    decoder, bodies, workers = Decoder(_SetRatio), ArrivingBodies(), TextWorkers()

    async def show() -> Response:
        return _json(cluster.ratio())

    async def change(request: Request) -> Response:
        async with arriving(request, BODY_TIMEOUT, bodies) as body:
            return _json(_change_ratio(cluster, await decoder.decode(body, workers)))

    async def advise(request: Request) -> Response:
        slo = request.query_params.get("slo")
        return _json(cluster.advise_ratio(parse_slo(slo) if slo else None))

    app.add_api_route("/admin/ratio", show, methods=["GET"])
    app.add_api_route("/admin/ratio/advice", advise, methods=["GET"])
    app.add_api_route("/admin/ratio", change, methods=["POST"])


def _change_ratio(cluster: ClusterView, wanted: _SetRatio) -> Ratio:
    """Raises InvalidRequest."""
    if (wanted.ratio is None) == (wanted.auto is None):
        raise InvalidRequest("give either ratio, as in 3:1, or auto, true or false", param="ratio")
    if wanted.slo is not None and not wanted.auto:
        raise InvalidRequest("slo belongs to auto: true", param="slo")
    if wanted.ratio is not None:
        return cluster.set_ratio(parse_split(wanted.ratio), wanted.flip_timeout)
    if wanted.auto:
        return cluster.auto_ratio(parse_slo(wanted.slo) if wanted.slo else None, wanted.flip_timeout)
    return cluster.manual_ratio()


async def _not_yet(request: Request) -> Response:
    raise NotAvailable(f"{request.method} {request.scope['path']} is not available yet")


def _json(message: Message) -> Response:
    return JSONResponse(
        MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    )
