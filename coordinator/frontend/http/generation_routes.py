"""The routes that take a body: generation, tokenizing, detokenizing."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from baton.errors import InvalidRequest
from baton.process.clock import monotonic_clock
from coordinator.core.admission.tenants import Tenant
from coordinator.frontend.auth import ClientAuthenticator
from coordinator.frontend.http.generation_response import GenerationResponse
from coordinator.frontend.http.info_routes import json_response
from coordinator.frontend.http.middleware import TENANT_KEY
from coordinator.frontend.http.request_body import receive_body
from coordinator.frontend.http.responses.chat import ChatFormatter
from coordinator.frontend.http.responses.completion import CompletionFormatter
from coordinator.frontend.http.schema.body_decoder import BodyDecoder, Kind, Result
from coordinator.frontend.http.schema.chat_request import ChatRequest
from coordinator.frontend.http.schema.completion_request import CompletionRequest
from coordinator.frontend.http.schema.tokenize_request import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from coordinator.frontend.request import GenerationRequest
from coordinator.frontend.request_intake import RequestIntake

TIMEOUT_HEADER = "x-request-timeout"

Asking = TypeVar("Asking", CompletionRequest, ChatRequest)


def add_generation_routes(app: FastAPI, intake: RequestIntake, who: ClientAuthenticator) -> None:
    unknown = intake.unknown_field_policy
    completion, chat = BodyDecoder(CompletionRequest, unknown), BodyDecoder(ChatRequest, unknown)
    tokenizing, detokenizing = (
        BodyDecoder(TokenizeRequest, unknown),
        BodyDecoder(DetokenizeRequest, unknown),
    )

    def on_account(ask: GenerationRequest, request: Request) -> GenerationRequest:
        tenant: Tenant = request.scope["state"][TENANT_KEY]
        return replace(
            ask, principal=who.make_principal(tenant, ask.priority), cache_salt=tenant.cache_salt
        )

    def counted(request: Request) -> AbstractContextManager[None]:
        return intake.rejections.count_rejections(request.scope["state"][TENANT_KEY].tenant_class)

    async def completions(request: Request) -> Response:
        with counted(request):
            body, ask = await _read_generation_request(request, intake, completion)
            ask = on_account(ask, request)
        return GenerationResponse(
            intake, ask, partial(CompletionFormatter, body), stream=bool(body.stream)
        )

    async def chat_completions(request: Request) -> Response:
        with counted(request):
            body, ask = await _read_generation_request(request, intake, chat)
            ask = on_account(ask, request)
        return GenerationResponse(
            intake, ask, partial(ChatFormatter, body), stream=bool(body.stream)
        )

    async def tokenize(request: Request) -> Response:
        with counted(request):
            body, wording, left = await _read_body(
                request, intake, tokenizing, lambda body, left: (body, body.tokenizer_input, left)
            )
            intake.check_model(body.model)
            text, tokens = await intake.tokenize(wording, body.add_special_tokens, left)
        pieces = await text.get_token_strings(tokens) if body.return_token_strs else None
        return json_response(
            TokenizeResponse(len(tokens), intake.get_served_model()[1], tokens, pieces)
        )

    async def detokenize(request: Request) -> Response:
        with counted(request):
            body, left = await _read_body(
                request, intake, detokenizing, lambda body, left: (body, left)
            )
            intake.check_model(body.model)
            if body.tokens is None:
                raise InvalidRequest("tokens is missing: it must be token ids", param="tokens")
            return json_response(DetokenizeResponse(await intake.detokenize(body.tokens, left)))

    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])


async def _read_body(
    request: Request,
    intake: RequestIntake,
    decoder: BodyDecoder[Kind],
    then: Callable[[Kind, float], Result],
) -> Result:
    """What `then` makes of the body and of the seconds that are left for the rest."""
    limit, began = (
        intake.effective_timeout(_requested_timeout(request), TIMEOUT_HEADER),
        monotonic_clock(),
    )
    async with receive_body(request, limit, intake.body_budgets) as body:

        def then_in_time(read: Kind) -> Result:
            return then(
                read, max(limit - (monotonic_clock() - began), 0.001)
            )  # it may have waited for a thread

        return await decoder.decode_and_apply(body, intake.text_workers, then_in_time)


async def _read_generation_request(
    request: Request, intake: RequestIntake, decoder: BodyDecoder[Asking]
) -> tuple[Asking, GenerationRequest]:
    client_id = request.headers.get("x-request-id")
    return await _read_body(
        request,
        intake,
        decoder,
        lambda body, left: (body, body.to_generation_request(left, client_id)),
    )


def _requested_timeout(request: Request) -> float | None:
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER} is {text[:64]!r}: it must be seconds", param=TIMEOUT_HEADER
        ) from None
