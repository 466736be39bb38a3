"""The way from either front door to the brain and back: tokenize, check, submit; then tokens to
text."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace

from baton import limits
from baton.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, ServiceUnavailable
from baton.limits import TextLimit
from baton.models.generation_defaults import GenerationDefaults
from baton.process import log
from baton.process.clock import Clock, monotonic_clock
from baton.types import RequestId
from coordinator.frontend.body_budget import BodyBudgets
from coordinator.frontend.output import OutputProcessor
from coordinator.frontend.rejections import RejectionCounter
from coordinator.frontend.request import (
    GenerationRequest,
    Prompt,
    check_request,
    check_timeout,
    count_prompts,
    rename_error_params,
    to_submission,
)
from coordinator.frontend.response_stream import ChoiceStream, PromptEcho, ResponseStream
from coordinator.frontend.unknown_fields import REJECT_UNKNOWN_FIELDS, UnknownFieldPolicy
from coordinator.generation import GenerationBackend, Submission
from coordinator.text.chat_template import ChatPrompt
from coordinator.text.text_workers import TextWorkers
from coordinator.text.tokenizer import Tokenizer

QUANTIZATION = "none"  # of weights, in this version
_LOADING_RETRY_SECONDS = 1.0  # seconds
_log = log.get_logger("front")


class RequestIntake:
    """One per coordinator, shared by HTTP and gRPC. `text` completes when the tokenizer has loaded.
    `on_client_id` is told the id that a client gave its request, and the request's own."""

    def __init__(
        self,
        generator: GenerationBackend,
        text: asyncio.Future[Tokenizer],
        *,
        model: str,
        longest: float,
        refusals: RejectionCounter,
        defaults: GenerationDefaults | None = None,
        unknown_fields: UnknownFieldPolicy = REJECT_UNKNOWN_FIELDS,
        workers: TextWorkers | None = None,
        bodies: BodyBudgets | None = None,
        clock: Clock = monotonic_clock,
        on_client_id: Callable[[str, RequestId], None] | None = None,
    ) -> None:
        self.rejections = refusals
        self.unknown_field_policy = unknown_fields
        self.body_budgets = bodies or BodyBudgets()
        self.text_workers = workers or TextWorkers()
        self._backend = generator
        self._model = model
        self._tokenizer = text
        self._max_timeout_seconds = longest
        self._defaults = defaults or GenerationDefaults()
        self._clock = clock
        self._on_client_id = on_client_id

    def effective_timeout(self, wanted: float | None, name: str = "timeout") -> float:
        """Seconds that a request may take: what its client asks, up to --request-timeout. Raises
        InvalidRequest."""
        return (
            self._max_timeout_seconds
            if wanted is None
            else min(check_timeout(wanted, name), self._max_timeout_seconds)
        )

    def get_served_model(self) -> tuple[str, int]:
        """The model's name and its longest context in tokens. Raises Unavailable while no node has
        joined."""
        return self._model, self._backend.get_model_bounds().max_context

    def get_model_identity(self) -> tuple[str, str, str]:
        """Digest of the model, dtype of its weights and cache, and their quantisation. Raises as
        `get_served_model`."""
        bounds = self._backend.get_model_bounds()
        return bounds.model_digest, bounds.dtype, QUANTIZATION

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound."""
        if name is not None and name != self._model:
            served = repr(self._model)
            raise ModelNotFound(
                f"model is {_quote_truncated(name)}: the model served here is {served}",
                param="model",
            )

    async def start_request(self, ask: GenerationRequest) -> ResponseStream:
        """Admit a request, all of its choices or none. Raises what the client did wrong (Rejected)
        or DeadlineExceeded; then nothing is held."""
        with (
            self.rejections.count_rejections(ask.principal.tenant_class),
            rename_error_params(ask.param_names),
        ):
            self.check_model(ask.model)
            check_request(ask)
            self._backend.require_admission(
                ask.principal,
                ask.n * count_prompts(ask),
                self.effective_timeout(ask.timeout_seconds),
            )
            text, firsts, echoes = await self._prepare_submissions(ask)
        submissions = [choice for first in firsts for choice in _expand_choices(first, ask.n)]
        generations = await self._backend.submit_requests(submissions)
        if ask.client_request_id is not None:
            _log.info("request", request=generations[0].id, client_request=ask.client_request_id)
            if self._on_client_id is not None:
                self._on_client_id(ask.client_request_id, generations[0].id)
        return ResponseStream(
            model=self._model,
            created_unix_seconds=int(time.time()),
            tokenizer=text,
            prompt_token_ids=[first.prompt_token_ids for first in firsts],
            choices=[
                ChoiceStream(generation, _build_output_processor(ask, text, index), index // ask.n)
                for index, generation in enumerate(generations)
            ],
            prompt_echoes=echoes,
            has_logprobs=ask.logprobs is not None,
            is_echo_only=ask.is_echo_only,
        )

    async def tokenize(
        self, wording: Prompt | ChatPrompt, special: bool | None, limit: float
    ) -> tuple[Tokenizer, tuple[int, ...]]:
        """`special` None is as it is done for a request. Raises InvalidRequest, TooLong,
        Overloaded, DeadlineExceeded; Unavailable while no node has joined or the tokenizer
        loads."""
        most = limits.get_tokenize_limit(self._backend.get_model_bounds())
        async with _deadline(limit):
            text = self._loaded_tokenizer()
            return text, await _encode_prompt(text, wording, most, special=special)

    async def detokenize(self, tokens: Sequence[int], limit: float) -> str:
        """Raises InvalidRequest, TooLong, Overloaded, DeadlineExceeded; Unavailable while no node
        has joined or the tokenizer loads."""
        bounds = self._backend.get_model_bounds()
        with rename_error_params({"prompt": "tokens"}):
            limits.get_tokenize_limit(bounds).check_token_count(len(tokens))
        limits.check_token_ids("tokens", tokens, bounds)
        async with _deadline(limit):
            return await self._loaded_tokenizer().decode(tokens)

    def _loaded_tokenizer(self) -> Tokenizer:
        """Raises Unavailable until the tokenizer is there: what waits for it would hold prompts
        without any bound."""
        if not self._tokenizer.done():
            raise ServiceUnavailable(
                "the tokenizer is still being loaded", retry_after=_LOADING_RETRY_SECONDS
            )
        return self._tokenizer.result()

    async def _prepare_submissions(
        self, ask: GenerationRequest
    ) -> tuple[Tokenizer, list[Submission], list[PromptEcho]]:
        """The first choice of each prompt, and the prompts to be given back."""
        assert ask.prompts is not None
        wordings: Sequence[Prompt | ChatPrompt]
        wordings = [ask.prompts] if isinstance(ask.prompts, ChatPrompt) else ask.prompts
        began = self._clock()
        limit = self.effective_timeout(ask.timeout_seconds)
        async with _deadline(limit):
            text = self._loaded_tokenizer()
            if ask.stop and not text.has_text:
                raise InvalidRequest(
                    "stop is given, but tokens have no text here: use stop_token_ids", param="stop"
                )
            prompts = await self._encode_prompts(text, wordings)
        left, bounds = max(limit - (self._clock() - began), 0.0), self._backend.get_model_bounds()
        firsts = []
        for number, prompt in enumerate(prompts):
            with _name_prompt_in_errors(number, prompts):
                firsts.append(to_submission(ask, prompt, left, bounds, self._defaults))
            await asyncio.sleep(0)  # a prompt can be long, and there can be many
        if ask.echo and ask.logprobs is not None:
            limits.check_prompt_logprobs(sum(map(len, prompts)), ask.logprobs)
        echoed = zip(wordings, prompts, strict=True) if ask.echo else ()
        scored = ask.logprobs is not None
        return (
            text,
            firsts,
            [
                await _build_prompt_echo(text, wording, prompt, placed=scored)
                for wording, prompt in echoed
            ],
        )

    async def _encode_prompts(
        self, text: Tokenizer, wordings: Sequence[Prompt | ChatPrompt]
    ) -> list[tuple[int, ...]]:
        """One after another, so that others have their turn between two of many prompts."""
        bounds = self._backend.get_model_bounds()
        most, prompts = limits.get_prompt_limit(bounds), list[tuple[int, ...]]()
        for number, wording in enumerate(wordings):
            with _name_prompt_in_errors(number, wordings):
                if not isinstance(wording, str | ChatPrompt):
                    limits.check_prompt_length(len(wording), bounds)
                prompt = await _encode_prompt(text, wording, most)
                limits.check_prompt_length(
                    len(prompt), bounds
                )  # before any time goes into the others
                prompts.append(prompt)
            await asyncio.sleep(0)
        return prompts


def _name_prompt_in_errors(
    number: int, all_of_them: Sequence[object]
) -> AbstractContextManager[None]:
    """A refusal inside says which of several prompts it is about."""
    return rename_error_params({"prompt": f"prompt[{number}]"} if len(all_of_them) > 1 else {})


def _expand_choices(first: Submission, n: int) -> Iterator[Submission]:
    """The scores of the prompt are the same for all."""
    yield first
    sampling = replace(first.sampling, prompt_logprobs=None)
    for number in range(1, n):
        yield replace(first, sampling=sampling, choice_index=first.choice_index + number)


async def _encode_prompt(
    text: Tokenizer, wording: Prompt | ChatPrompt, limit: TextLimit, *, special: bool | None = None
) -> tuple[int, ...]:
    """A chat template writes the special tokens itself; around any other text go those that its
    model expects."""
    if isinstance(wording, ChatPrompt):
        return await text.encode_chat(wording, special=bool(special), limit=limit)
    if isinstance(wording, str):
        return await text.encode(wording, special=special is not False, limit=limit)
    return tuple(wording)


async def _build_prompt_echo(
    text: Tokenizer, wording: Prompt | ChatPrompt, tokens: tuple[int, ...], *, placed: bool
) -> PromptEcho:
    """`placed`: where each token begins is asked for."""
    if isinstance(wording, str):
        return PromptEcho(wording, await text.compute_token_offsets(wording) if placed else ())
    return PromptEcho(*await text.decode_with_offsets(tokens))


def _build_output_processor(ask: GenerationRequest, text: Tokenizer, index: int) -> OutputProcessor:
    """An answer in a conversation is a text of its own; any other goes on with its prompt's."""
    return OutputProcessor(
        index,
        text.create_detokenizer(continuing=not isinstance(ask.prompts, ChatPrompt)),
        stop=ask.stop,
        scored=ask.logprobs is not None,
        unsearched=ask.min_tokens or 0,
    )


@asynccontextmanager
async def _deadline(limit: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit):
            yield
    except TimeoutError:
        raise DeadlineExceeded(
            f"the deadline of {limit:g} s passed before the prompt was tokenized"
        ) from None


def _quote_truncated(name: str) -> str:
    return repr(name if len(name) <= 64 else name[:61] + "...")
