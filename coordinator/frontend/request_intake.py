"""Tokenizes, checks and submits the requests of both front ends, and streams their output."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from baton.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    ServiceUnavailable,
)
from baton.models.generation_defaults import GenerationDefaults
from baton.process import log
from baton.process.clock import Clock, monotonic_clock
from baton.types import Request, RequestId, StructuredOutput
from coordinator.frontend.body_budget import BodyBudgets
from coordinator.frontend.output import (
    ChoiceStream,
    OutputProcessor,
    PromptEcho,
    PromptScoring,
    ResponseStream,
)
from coordinator.frontend.output_parsing import OutputParserSettings, OutputParsing
from coordinator.frontend.prompt_encoding import (
    build_prompt_echoes,
    check_client_tokens,
    check_prompt_scoring,
    encode_for_client,
    encode_prompts,
    name_prompt_in_errors,
)
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

CheckGrammar = Callable[[StructuredOutput], Awaitable[StructuredOutput]]

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
        output_parsers: OutputParserSettings | None = None,
        workers: TextWorkers | None = None,
        bodies: BodyBudgets | None = None,
        clock: Clock = monotonic_clock,
        on_client_request_id: Callable[[str, RequestId], None] | None = None,
        check_grammar: CheckGrammar | None = None,
    ) -> None:
        """`tokenizer` completes when the tokenizer has loaded.

        `on_client_request_id` is called with the id that a client gave its request, and the
        request's own. `check_grammar` compiles the grammar of an output, and returns it as nodes
        do; without it, structured output is refused.
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
        self._output_parsers = output_parsers or OutputParserSettings()
        self._clock = clock
        self._on_client_request_id = on_client_request_id
        self._check_grammar = check_grammar or _refuse_grammar

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

    def get_tokenizer_settings(self) -> Mapping[str, object]:
        """The model's tokenizer_config.json, with the chat template that is used.

        Raises NotFound without a tokenizer, and ServiceUnavailable while it loads.
        """
        tokenizer = self._loaded_tokenizer()
        if not tokenizer.has_text:
            raise NotFound(f"the model {self._model!r} has no tokenizer here")
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **tokenizer.settings,
            "chat_template": tokenizer.chat_template_source,
        }

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
            parsing = self._choose_parsing(tokenizer, request)
        choices = [choice for first in firsts for choice in expand_choices(first, request.n)]
        generations = await self._backend.submit_requests(choices)
        self._note_client_request_id(request.client_request_id, generations[0].id)
        return ResponseStream(
            model=self._model,
            created_unix_seconds=int(time.time()),
            tokenizer=tokenizer,
            prompt_token_ids=[first.prompt_token_ids for first in firsts],
            choices=[
                ChoiceStream(
                    generation,
                    partial(_build_output_processor, request, tokenizer, index, parsing),
                    index // request.n,
                )
                for index, generation in enumerate(generations)
            ],
            prompt_echoes=echoes,
            prompt_scoring=PromptScoring(
                request.logprobs if request.echo else None, request.prompt_logprobs
            ),
            is_echo_only=request.is_echo_only,
            parsing=parsing,
        )

    def _choose_parsing(
        self, tokenizer: Tokenizer, request: GenerationRequest
    ) -> OutputParsing | None:
        if not request.has_parsed_output:
            return None
        return self._output_parsers.choose_parsing(
            tokenizer,
            request.tool_use,
            separates_reasoning=request.separates_reasoning,
            has_fixed_form=request.has_fixed_form,
        )

    def _note_client_request_id(self, client_id: str | None, request_id: RequestId) -> None:
        if client_id is None:
            return
        _log.info("request received", request=request_id, client_request=client_id)
        if self._on_client_request_id is not None:
            self._on_client_request_id(client_id, request_id)

    async def tokenize(
        self, prompt: Prompt | ChatPrompt, add_special_tokens: bool | None, timeout_seconds: float
    ) -> tuple[Tokenizer, tuple[int, ...]]:
        """Tokenize a prompt, with special tokens as in a request unless told otherwise.

        Raises InvalidRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded, and
        ServiceUnavailable while no node has joined or the tokenizer loads.
        """
        bounds = self._backend.get_model_bounds()
        async with _deadline(timeout_seconds):
            tokenizer = self._loaded_tokenizer()
            tokens = await encode_for_client(tokenizer, prompt, bounds, add_special_tokens)
            return tokenizer, tokens

    async def detokenize(self, tokens: Sequence[int], timeout_seconds: float) -> str:
        """Return the text of tokens. Raises the errors of `tokenize`."""
        check_client_tokens(tokens, self._backend.get_model_bounds())
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
            grammar_seconds = 0.0
            if request.structured_output is not None:
                begun_at = self._clock()
                checked = await self._check_grammar(request.structured_output)
                request = replace(request, structured_output=checked)
                grammar_seconds = self._clock() - begun_at
            encoded = await encode_prompts(
                tokenizer, prompts, request, self._backend.get_model_bounds()
            )
        seconds_left = max(timeout - (self._clock() - started_at), 0.0)
        bounds = self._backend.get_model_bounds()
        firsts = []
        for index, tokens in enumerate(encoded):
            with name_prompt_in_errors(index, encoded):
                first = build_request(request, tokens, seconds_left, bounds, self._defaults)
                firsts.append(replace(first, grammar_seconds=grammar_seconds))
            await asyncio.sleep(0)  # a prompt can be long, and there can be many
        check_prompt_scoring(request, encoded)
        echoes = await build_prompt_echoes(tokenizer, prompts, encoded, request)
        return tokenizer, firsts, echoes


def _build_output_processor(
    request: GenerationRequest, tokenizer: Tokenizer, index: int, parsing: OutputParsing | None
) -> OutputProcessor:
    """The output continues the prompt's text, or the last message of a conversation if asked to."""
    is_continuation = (
        not isinstance(request.prompts, ChatPrompt) or request.prompts.continue_final_message
    )
    return OutputProcessor(
        index,
        tokenizer.create_detokenizer(
            is_continuation=is_continuation,
            shown_special=parsing.shown_special if parsing else frozenset(),
        ),
        stop=request.stop,
        with_logprobs=request.logprobs is not None,
        min_tokens=request.min_tokens or 0,
        stop_token_ids=request.stop_token_ids,
    )


async def _refuse_grammar(grammar: StructuredOutput) -> StructuredOutput:
    raise InvalidRequest("structured_output is not available here", param="structured_output")


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
