"""The GET routes: models, health, version."""

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from baton.errors import ServiceUnavailable
from coordinator.frontend.request_intake import RequestIntake
from coordinator.readiness import Readiness


class ModelCard(msgspec.Struct):
    id: str
    max_model_len: int
    model_digest: str
    dtype: str
    quantization: str
    object: str = "model"
    created: int = 0
    owned_by: str = "baton"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class Health(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


def add_info_routes(
    app: FastAPI, intake: RequestIntake, readiness: Readiness, version: str
) -> None:
    async def models() -> Response:
        return json_response(
            ModelList([ModelCard(*intake.get_served_model(), *intake.get_model_identity())])
        )

    async def model(model_id: str) -> Response:
        intake.check_model(model_id)
        return json_response(ModelCard(*intake.get_served_model(), *intake.get_model_identity()))

    async def health() -> Response:
        ready, reason = readiness.state()
        if not ready:
            raise ServiceUnavailable(f"not ready: {reason}", retry_after=1.0)
        return json_response(Health("ok"))

    async def about() -> Response:
        return json_response(Version(version))

    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", model, methods=["GET"])  # ids may have slashes
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/ping", health, methods=["GET", "POST"])
    app.add_api_route("/version", about, methods=["GET"])


def json_response(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
