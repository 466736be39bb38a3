"""The GET routes: models, tokenizer, health, version."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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


def build_info_routes(intake: RequestIntake, readiness: Readiness, version: str) -> list[Route]:
    async def models(_: Request) -> Response:
        return json_response(
            ModelList([ModelCard(*intake.get_served_model(), *intake.get_model_identity())])
        )

    async def model(request: Request) -> Response:
        intake.check_model(request.path_params["model_id"])
        return json_response(ModelCard(*intake.get_served_model(), *intake.get_model_identity()))

    async def tokenizer_info(_: Request) -> Response:
        body = msgspec.json.encode(intake.get_tokenizer_settings())
        return Response(body, media_type="application/json")

    async def health(_: Request) -> Response:
        ready, reason = readiness.state()
        if not ready:
            raise ServiceUnavailable(f"not ready: {reason}", retry_after=1.0)
        return json_response(Health("ok"))

    async def about(_: Request) -> Response:
        return json_response(Version(version))

    return [
        Route("/v1/models", models),
        Route("/v1/models/{model_id:path}", model),  # ids may have slashes
        Route("/tokenizer_info", tokenizer_info),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", about),
    ]


def json_response(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
