"""The POST routes: completions, chat completions, tokenize, detokenize."""

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
from coordinator.frontend.http.schema.generation_requests import ChatRequest, CompletionRequest
from coordinator.frontend.http.schema.tokenize_request import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from coordinator.frontend.request import GenerationRequest
from coordinator.frontend.request_intake import RequestIntake

TIMEOUT_HEADER = "x-request-timeout"

GenerationBody = TypeVar("GenerationBody", CompletionRequest, ChatRequest)


def add_generation_routes(
    app: FastAPI, intake: RequestIntake, client_auth: ClientAuthenticator
) -> None:
    policy = intake.unknown_field_policy
    completion_decoder = BodyDecoder(CompletionRequest, policy)
    chat_decoder = BodyDecoder(ChatRequest, policy)
    tokenize_decoder = BodyDecoder(TokenizeRequest, policy)
    detokenize_decoder = BodyDecoder(DetokenizeRequest, policy)

    def with_principal(
        generation_request: GenerationRequest, request: Request
    ) -> GenerationRequest:
        tenant: Tenant = request.scope["state"][TENANT_KEY]
        return replace(
            generation_request,
            principal=client_auth.make_principal(tenant, generation_request.priority),
            cache_salt=tenant.cache_salt,
        )

    def count_rejections(request: Request) -> AbstractContextManager[None]:
        return intake.rejections.count_rejections(request.scope["state"][TENANT_KEY].tenant_class)

    async def completions(request: Request) -> Response:
        with count_rejections(request):
            body, generation_request = await _read_generation_request(
                request, intake, completion_decoder
            )
            generation_request = with_principal(generation_request, request)
        formatter = partial(CompletionFormatter, body)
        return GenerationResponse(intake, generation_request, formatter, stream=bool(body.stream))

    async def chat_completions(request: Request) -> Response:
        with count_rejections(request):
            body, generation_request = await _read_generation_request(request, intake, chat_decoder)
            generation_request = with_principal(generation_request, request)
        formatter = partial(ChatFormatter, body)
        return GenerationResponse(intake, generation_request, formatter, stream=bool(body.stream))

    async def tokenize(request: Request) -> Response:
        with count_rejections(request):
            body, prompt, seconds_left = await _read_body(
                request,
                intake,
                tokenize_decoder,
                lambda body, seconds_left: (body, body.tokenizer_input, seconds_left),
            )
            intake.check_model(body.model)
            tokenizer, tokens = await intake.tokenize(prompt, body.add_special_tokens, seconds_left)
        strings = await tokenizer.get_token_strings(tokens) if body.return_token_strs else None
        return json_response(
            TokenizeResponse(len(tokens), intake.get_served_model()[1], tokens, strings)
        )

    async def detokenize(request: Request) -> Response:
        with count_rejections(request):
            body, seconds_left = await _read_body(
                request, intake, detokenize_decoder, lambda body, seconds_left: (body, seconds_left)
            )
            intake.check_model(body.model)
            if body.tokens is None:
                raise InvalidRequest("tokens is missing: it must be token ids", param="tokens")
            text = await intake.detokenize(body.tokens, seconds_left)
            return json_response(DetokenizeResponse(text))

    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])


async def _read_body(
    request: Request,
    intake: RequestIntake,
    decoder: BodyDecoder[Kind],
    convert: Callable[[Kind, float], Result],
) -> Result:
    """Receive and decode the body; return `convert` of it and of the seconds left for the request.

    The time is measured after decoding, which may have waited for a thread.
    """
    timeout = intake.effective_timeout(_requested_timeout(request), TIMEOUT_HEADER)
    started_at = monotonic_clock()
    async with receive_body(request, timeout, intake.body_budgets) as body:

        def convert_in_time(decoded: Kind) -> Result:
            return convert(decoded, max(timeout - (monotonic_clock() - started_at), 0.001))

        return await decoder.decode_and_apply(body, intake.text_workers, convert_in_time)


async def _read_generation_request(
    request: Request, intake: RequestIntake, decoder: BodyDecoder[GenerationBody]
) -> tuple[GenerationBody, GenerationRequest]:
    client_id = request.headers.get("x-request-id")
    return await _read_body(
        request,
        intake,
        decoder,
        lambda body, seconds_left: (body, body.to_generation_request(seconds_left, client_id)),
    )


def _requested_timeout(request: Request) -> float | None:
    """Raises InvalidRequest."""
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER} is {text[:64]!r}: it must be seconds", param=TIMEOUT_HEADER
        ) from None
