"""The POST routes: completions, chat completions, responses, tokenize, detokenize."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.errors import InvalidRequest
from baton.process.clock import monotonic_clock
from coordinator.frontend.auth import ClientAuthenticator
from coordinator.frontend.http.generation_response import GenerationResponse
from coordinator.frontend.http.info_routes import json_response
from coordinator.frontend.http.request_handling import (
    get_tenant,
    receive_body,
)
from coordinator.frontend.http.responses.chat import ChatFormatter
from coordinator.frontend.http.responses.completion import CompletionFormatter
from coordinator.frontend.http.responses.response_formatter import ResponseFormatter
from coordinator.frontend.http.schema.body_decoder import BodyDecoder, Kind, Result
from coordinator.frontend.http.schema.generation_requests import ChatRequest, CompletionRequest
from coordinator.frontend.http.schema.responses_request import ResponsesRequest
from coordinator.frontend.http.schema.tokenize_request import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from coordinator.frontend.request import GenerationRequest
from coordinator.frontend.request_intake import RequestIntake

TIMEOUT_HEADER = "x-request-timeout"

GenerationBody = TypeVar("GenerationBody", CompletionRequest, ChatRequest, ResponsesRequest)


class GenerationEndpoints:
    """The endpoints of the POST routes. Each counts the requests that it rejects."""

    def __init__(self, intake: RequestIntake, client_auth: ClientAuthenticator) -> None:
        policy = intake.unknown_field_policy
        self._intake = intake
        self._client_auth = client_auth
        self._completion_decoder = BodyDecoder(CompletionRequest, policy)
        self._chat_decoder = BodyDecoder(ChatRequest, policy)
        self._responses_decoder = BodyDecoder(ResponsesRequest, policy)
        self._tokenize_decoder = BodyDecoder(TokenizeRequest, policy)
        self._detokenize_decoder = BodyDecoder(DetokenizeRequest, policy)

    def list_routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete_chat, methods=["POST"]),
            Route("/v1/responses", self.respond, methods=["POST"]),
            Route("/v1/embeddings", self.embed, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def complete(self, request: Request) -> Response:
        with self._count_rejections(request):
            body, generation_request = await self._read_generation_request(
                request, self._completion_decoder
            )
        formatter = partial(CompletionFormatter, body)
        return GenerationResponse(
            self._intake, generation_request, formatter, stream=bool(body.stream)
        )

    async def complete_chat(self, request: Request) -> Response:
        with self._count_rejections(request):
            body, generation_request = await self._read_generation_request(
                request, self._chat_decoder
            )
        formatter = partial(ChatFormatter, body)
        return GenerationResponse(
            self._intake, generation_request, formatter, stream=bool(body.stream)
        )

    async def respond(self, request: Request) -> Response:
        with self._count_rejections(request):
            body, generation_request = await self._read_generation_request(
                request, self._responses_decoder
            )
        formatter = partial(ResponseFormatter, body)
        return GenerationResponse(
            self._intake, generation_request, formatter, stream=bool(body.stream)
        )

    async def embed(self, request: Request) -> Response:
        with self._count_rejections(request):
            model, _ = self._intake.get_served_model()
            raise InvalidRequest(
                f"the model {model!r} generates text and has no embeddings: use a model made for "
                "them",
                param="model",
            )

    async def tokenize(self, request: Request) -> Response:
        intake = self._intake
        with self._count_rejections(request):
            body, prompt, seconds_left = await read_body(
                request,
                intake,
                self._tokenize_decoder,
                lambda body, seconds_left: (body, body.tokenizer_input, seconds_left),
            )
            intake.check_model(body.model)
            tokenizer, tokens = await intake.tokenize(prompt, body.add_special_tokens, seconds_left)
        strings = await tokenizer.get_token_strings(tokens) if body.return_token_strs else None
        return json_response(
            TokenizeResponse(len(tokens), intake.get_served_model()[1], tokens, strings)
        )

    async def detokenize(self, request: Request) -> Response:
        intake = self._intake
        with self._count_rejections(request):
            body, seconds_left = await read_body(
                request,
                intake,
                self._detokenize_decoder,
                lambda body, seconds_left: (body, seconds_left),
            )
            intake.check_model(body.model)
            if body.tokens is None:
                raise InvalidRequest("tokens is missing: it must be token ids", param="tokens")
            text = await intake.detokenize(body.tokens, seconds_left)
            return json_response(DetokenizeResponse(text))

    def _count_rejections(self, request: Request) -> AbstractContextManager[None]:
        return self._intake.rejections.count_rejections(get_tenant(request).tenant_class)

    async def _read_generation_request(
        self, request: Request, decoder: BodyDecoder[GenerationBody]
    ) -> tuple[GenerationBody, GenerationRequest]:
        """Return the body, and what it asks for with the rights of the caller's tenant."""
        client_id = request.headers.get("x-request-id")
        body, generation_request = await read_body(
            request,
            self._intake,
            decoder,
            lambda body, seconds_left: (body, body.to_generation_request(seconds_left, client_id)),
        )
        tenant = get_tenant(request)
        principal = self._client_auth.make_principal(tenant, generation_request.priority)
        return body, replace(generation_request, principal=principal, cache_salt=tenant.cache_salt)


async def read_body(
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
