"""GET /metrics in Prometheus' text format, on the admin port and optionally the HTTP port."""

from collections.abc import Callable

from fastapi import FastAPI
from starlette.responses import PlainTextResponse, Response

METRICS_PATH = "/metrics"
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def add_metrics_route(app: FastAPI, render: Callable[[], bytes]) -> None:
    async def metrics() -> Response:
        return PlainTextResponse(render(), headers={"content-type": _CONTENT_TYPE})

    app.add_api_route(METRICS_PATH, metrics, methods=["GET"])
