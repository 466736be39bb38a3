"""Tokenizes, checks and submits the requests of both front ends, and streams their output."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial

from baton import limits
from baton.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, ServiceUnavailable
from baton.limits import TextLimit
from baton.models.generation_defaults import GenerationDefaults
from baton.process import log
from baton.process.clock import Clock, monotonic_clock
from baton.types import Request, RequestId
from coordinator.frontend.body_budget import BodyBudgets
from coordinator.frontend.output import ChoiceStream, OutputProcessor, PromptEcho, ResponseStream
from coordinator.frontend.request import (
    GenerationRequest,
    Prompt,
    RejectionCounter,
    build_request,
    check_request,
    check_timeout,
    count_prompts,
    expand_choices,
    rename_error_params,
)
from coordinator.frontend.unknown_fields import REJECT_UNKNOWN_FIELDS, UnknownFieldPolicy
from coordinator.generation import GenerationBackend
from coordinator.text.chat_template import ChatPrompt
from coordinator.text.text_workers import TextWorkers
from coordinator.text.tokenizer import Tokenizer

_LOADING_RETRY_SECONDS = 1.0  # after which a client may try again
_log = log.get_logger("front")


class RequestIntake:
    """Checks and tokenizes requests and submits them to the backend, for both HTTP and gRPC."""

    def __init__(
        self,
        backend: GenerationBackend,
        tokenizer: asyncio.Future[Tokenizer],
        *,
        model: str,
        max_timeout_seconds: float,
        rejections: RejectionCounter,
        defaults: GenerationDefaults | None = None,
        unknown_fields: UnknownFieldPolicy = REJECT_UNKNOWN_FIELDS,
        workers: TextWorkers | None = None,
        bodies: BodyBudgets | None = None,
        clock: Clock = monotonic_clock,
        on_client_request_id: Callable[[str, RequestId], None] | None = None,
    ) -> None:
        """`tokenizer` completes when the tokenizer has loaded.

        `on_client_request_id` is called with the id that a client gave its request, and the
        request's own.
        """
        self.rejections = rejections
        self.unknown_field_policy = unknown_fields
        self.body_budgets = bodies or BodyBudgets()
        self.text_workers = workers or TextWorkers()
        self._backend = backend
        self._model = model
        self._tokenizer = tokenizer
        self._max_timeout_seconds = max_timeout_seconds
        self._defaults = defaults or GenerationDefaults()
        self._clock = clock
        self._on_client_request_id = on_client_request_id

    def effective_timeout(self, requested: float | None, name: str = "timeout") -> float:
        """Seconds that a request may take: what the client asks for, up to --request-timeout.

        `name` is the field or header, for the error. Raises InvalidRequest.
        """
        return (
            self._max_timeout_seconds
            if requested is None
            else min(check_timeout(requested, name), self._max_timeout_seconds)
        )

    def get_served_model(self) -> tuple[str, int]:
        """The model's name and its maximum context in tokens.

        Raises ServiceUnavailable while no node has joined.
        """
        return self._model, self._backend.get_model_bounds().max_context

    def get_model_identity(self) -> tuple[str, str, str]:
        """Digest of the model, dtype of weights and cache, and quantization.

        Raises ServiceUnavailable while no node has joined.
        """
        bounds = self._backend.get_model_bounds()
        return bounds.model_digest, bounds.dtype, bounds.quantization

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound."""
        if name is not None and name != self._model:
            served = repr(self._model)
            raise ModelNotFound(
                f"model is {_quote_truncated(name)}: the model served here is {served}",
                param="model",
            )

    async def start_request(self, request: GenerationRequest) -> ResponseStream:
        """Admit a request: all of its choices or none.

        Raises RequestRejected for errors of the client, or DeadlineExceeded; then no resource is
        held.
        """
        with (
            self.rejections.count_rejections(request.principal.tenant_class),
            rename_error_params(request.param_names),
        ):
            self.check_model(request.model)
            check_request(request)
            self._backend.require_admission(
                request.principal,
                request.n * count_prompts(request),
                self.effective_timeout(request.timeout_seconds),
            )
            tokenizer, firsts, echoes = await self._build_requests(request)
        choices = [choice for first in firsts for choice in expand_choices(first, request.n)]
        generations = await self._backend.submit_requests(choices)
        if request.client_request_id is not None:
            _log.info(
                "request received",
                request=generations[0].id,
                client_request=request.client_request_id,
            )
            if self._on_client_request_id is not None:
                self._on_client_request_id(request.client_request_id, generations[0].id)
        return ResponseStream(
            model=self._model,
            created_unix_seconds=int(time.time()),
            tokenizer=tokenizer,
            prompt_token_ids=[first.prompt_token_ids for first in firsts],
            choices=[
                ChoiceStream(
                    generation,
                    partial(_build_output_processor, request, tokenizer, index),
                    index // request.n,
                )
                for index, generation in enumerate(generations)
            ],
            prompt_echoes=echoes,
            has_logprobs=request.logprobs is not None,
            is_echo_only=request.is_echo_only,
        )

    async def tokenize(
        self, prompt: Prompt | ChatPrompt, add_special_tokens: bool | None, timeout_seconds: float
    ) -> tuple[Tokenizer, tuple[int, ...]]:
        """Tokenize a prompt, with special tokens as in a request unless told otherwise.

        Raises InvalidRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded, and
        ServiceUnavailable while no node has joined or the tokenizer loads.
        """
        limit = limits.get_tokenize_limit(self._backend.get_model_bounds())
        async with _deadline(timeout_seconds):
            tokenizer = self._loaded_tokenizer()
            tokens = await _encode_prompt(
                tokenizer, prompt, limit, add_special_tokens=add_special_tokens
            )
            return tokenizer, tokens

    async def detokenize(self, tokens: Sequence[int], timeout_seconds: float) -> str:
        """Return the text of tokens. Raises the errors of `tokenize`."""
        bounds = self._backend.get_model_bounds()
        with rename_error_params({"prompt": "tokens"}):
            limits.get_tokenize_limit(bounds).check_token_count(len(tokens))
        limits.check_token_ids("tokens", tokens, bounds)
        async with _deadline(timeout_seconds):
            return await self._loaded_tokenizer().decode(tokens)

    def _loaded_tokenizer(self) -> Tokenizer:
        """Raises ServiceUnavailable until the tokenizer has loaded.

        Requests do not wait for it, because they would hold prompts without any bound.
        """
        if not self._tokenizer.done():
            raise ServiceUnavailable(
                "the tokenizer is still being loaded", retry_after=_LOADING_RETRY_SECONDS
            )
        return self._tokenizer.result()

    async def _build_requests(
        self, request: GenerationRequest
    ) -> tuple[Tokenizer, list[Request], list[PromptEcho]]:
        """Return the tokenizer, the first choice of each prompt, and the prompts to echo."""
        assert request.prompts is not None
        prompts: Sequence[Prompt | ChatPrompt]
        prompts = [request.prompts] if isinstance(request.prompts, ChatPrompt) else request.prompts
        started_at = self._clock()
        timeout = self.effective_timeout(request.timeout_seconds)
        async with _deadline(timeout):
            tokenizer = self._loaded_tokenizer()
            if request.stop and not tokenizer.has_text:
                raise InvalidRequest(
                    "stop is given, but tokens have no text here: use stop_token_ids", param="stop"
                )
            encoded = await self._encode_prompts(tokenizer, prompts)
        seconds_left = max(timeout - (self._clock() - started_at), 0.0)
        bounds = self._backend.get_model_bounds()
        firsts = []
        for index, tokens in enumerate(encoded):
            with _name_prompt_in_errors(index, encoded):
                firsts.append(build_request(request, tokens, seconds_left, bounds, self._defaults))
            await asyncio.sleep(0)  # a prompt can be long, and there can be many
        if not request.echo:
            return tokenizer, firsts, []
        if request.logprobs is not None:
            limits.check_prompt_logprobs(sum(map(len, encoded)), request.logprobs)
        with_offsets = request.logprobs is not None
        echoes = [
            await _build_prompt_echo(tokenizer, prompt, tokens, with_offsets=with_offsets)
            for prompt, tokens in zip(prompts, encoded, strict=True)
        ]
        return tokenizer, firsts, echoes

    async def _encode_prompts(
        self, tokenizer: Tokenizer, prompts: Sequence[Prompt | ChatPrompt]
    ) -> list[tuple[int, ...]]:
        """Encode prompts one after another, so that other requests run between two of them."""
        bounds = self._backend.get_model_bounds()
        limit = limits.get_prompt_limit(bounds)
        encoded: list[tuple[int, ...]] = []
        for index, prompt in enumerate(prompts):
            with _name_prompt_in_errors(index, prompts):
                if not isinstance(prompt, str | ChatPrompt):
                    limits.check_prompt_length(len(prompt), bounds)
                tokens = await _encode_prompt(tokenizer, prompt, limit)
                # Checked here, before any time is spent on the other prompts.
                limits.check_prompt_length(len(tokens), bounds)
                encoded.append(tokens)
            await asyncio.sleep(0)
        return encoded


def _name_prompt_in_errors(index: int, prompts: Sequence[object]) -> AbstractContextManager[None]:
    """Make errors of the block say which of several prompts they are about."""
    return rename_error_params({"prompt": f"prompt[{index}]"} if len(prompts) > 1 else {})


async def _encode_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt | ChatPrompt,
    limit: TextLimit,
    *,
    add_special_tokens: bool | None = None,
) -> tuple[int, ...]:
    """By default, special tokens are added to a text, but not to a conversation.

    A chat template writes them itself.
    """
    if isinstance(prompt, ChatPrompt):
        return await tokenizer.encode_chat(
            prompt, add_special_tokens=bool(add_special_tokens), limit=limit
        )
    if isinstance(prompt, str):
        return await tokenizer.encode(
            prompt, add_special_tokens=add_special_tokens is not False, limit=limit
        )
    return tuple(prompt)


async def _build_prompt_echo(
    tokenizer: Tokenizer,
    prompt: Prompt | ChatPrompt,
    tokens: tuple[int, ...],
    *,
    with_offsets: bool,
) -> PromptEcho:
    if isinstance(prompt, str):
        offsets = await tokenizer.compute_token_offsets(prompt) if with_offsets else ()
        return PromptEcho(prompt, offsets)
    return PromptEcho(*await tokenizer.decode_with_offsets(tokens))


def _build_output_processor(
    request: GenerationRequest, tokenizer: Tokenizer, index: int
) -> OutputProcessor:
    """The output continues the prompt's text, except in a conversation."""
    return OutputProcessor(
        index,
        tokenizer.create_detokenizer(is_continuation=not isinstance(request.prompts, ChatPrompt)),
        stop=request.stop,
        with_logprobs=request.logprobs is not None,
        min_tokens=request.min_tokens or 0,
    )


@asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    """Limit the block to `seconds`. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceeded(
            f"the deadline of {seconds:g} s passed before the prompt was tokenized"
        ) from None


def _quote_truncated(name: str) -> str:
    return repr(name if len(name) <= 64 else name[:61] + "...")
