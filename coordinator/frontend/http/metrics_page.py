"""GET /metrics in Prometheus' text format, on the admin port and optionally the HTTP port."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

METRICS_PATH = "/metrics"
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_metrics_route(render: Callable[[], bytes]) -> Route:
    async def metrics(_: Request) -> Response:
        return PlainTextResponse(render(), headers={"content-type": _CONTENT_TYPE})

    return Route(METRICS_PATH, metrics)
