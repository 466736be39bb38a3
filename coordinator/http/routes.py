"""The routes that take a body: generation, tokenizing, detokenizing."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from baton.clock import steady
from baton.errors import InvalidRequest
from coordinator.ask import Ask
from coordinator.auth import Clients
from coordinator.core.tenants import Tenant
from coordinator.http.answering import AnswerResponse
from coordinator.http.boundary import TENANT
from coordinator.http.chat_schema import ChatRequest
from coordinator.http.chat_shape import ChatShape
from coordinator.http.completion_schema import CompletionRequest
from coordinator.http.completion_shape import CompletionShape
from coordinator.http.connection import arriving
from coordinator.http.decoding import Decoder, Kind, Result
from coordinator.http.information import json_response
from coordinator.http.token_schema import DetokenizedText, DetokenizeRequest, TokenizeRequest, Tokens
from coordinator.intake import Intake

TIMEOUT_HEADER = "x-request-timeout"

Asking = TypeVar("Asking", CompletionRequest, ChatRequest)


def add_routes(app: FastAPI, intake: Intake, who: Clients) -> None:
    unknown = intake.unknown_fields
    completion, chat = Decoder(CompletionRequest, unknown), Decoder(ChatRequest, unknown)
    tokenizing, detokenizing = Decoder(TokenizeRequest, unknown), Decoder(DetokenizeRequest, unknown)

    def on_account(ask: Ask, request: Request) -> Ask:
        tenant: Tenant = request.scope["state"][TENANT]
        return replace(ask, standing=who.standing(tenant, ask.priority), cache_salt=tenant.salt)

    def counted(request: Request) -> AbstractContextManager[None]:
        return intake.refusals.counted(request.scope["state"][TENANT].tenant_class)

    async def completions(request: Request) -> Response:
        with counted(request):
            body, ask = await _read_ask(request, intake, completion)
            ask = on_account(ask, request)
        return AnswerResponse(intake, ask, partial(CompletionShape, body), stream=bool(body.stream))

    async def chat_completions(request: Request) -> Response:
        with counted(request):
            body, ask = await _read_ask(request, intake, chat)
            ask = on_account(ask, request)
        return AnswerResponse(intake, ask, partial(ChatShape, body), stream=bool(body.stream))

    async def tokenize(request: Request) -> Response:
        with counted(request):
            body, wording, left = await _read(
                request, intake, tokenizing, lambda body, left: (body, body.wording, left)
            )
            intake.check_model(body.model)
            text, tokens = await intake.tokenize(wording, body.add_special_tokens, left)
        pieces = await text.pieces(tokens) if body.return_token_strs else None
        return json_response(Tokens(len(tokens), intake.served()[1], tokens, pieces))

    async def detokenize(request: Request) -> Response:
        with counted(request):
            body, left = await _read(request, intake, detokenizing, lambda body, left: (body, left))
            intake.check_model(body.model)
            if body.tokens is None:
                raise InvalidRequest("tokens is missing: it must be token ids", param="tokens")
            return json_response(DetokenizedText(await intake.detokenize(body.tokens, left)))

    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])


async def _read(
    request: Request, intake: Intake, decoder: Decoder[Kind], then: Callable[[Kind, float], Result]
) -> Result:
    """What `then` makes of the body and of the seconds that are left for the rest."""
    limit, began = intake.time_limit(_wanted_time(request), TIMEOUT_HEADER), steady()
    async with arriving(request, limit, intake.bodies) as body:

        def then_in_time(read: Kind) -> Result:
            return then(read, max(limit - (steady() - began), 0.001))  # it may have waited for a thread

        return await decoder.decode_then(body, intake.workers, then_in_time)


async def _read_ask(request: Request, intake: Intake, decoder: Decoder[Asking]) -> tuple[Asking, Ask]:
    client_id = request.headers.get("x-request-id")
    return await _read(request, intake, decoder, lambda body, left: (body, body.to_ask(left, client_id)))


def _wanted_time(request: Request) -> float | None:
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(f"{TIMEOUT_HEADER} is {text[:64]!r}: it must be seconds", param=TIMEOUT_HEADER) from None
