"""GET /metrics: Prometheus' text format, for the admin port, and for the HTTP port if asked for."""

from collections.abc import Callable

from fastapi import FastAPI
from starlette.responses import PlainTextResponse, Response

PATH = "/metrics"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def add_metrics(app: FastAPI, render: Callable[[], bytes]) -> None:
    async def metrics() -> Response:
        return PlainTextResponse(render(), headers={"content-type": _TYPE})

    app.add_api_route(PATH, metrics, methods=["GET"])
