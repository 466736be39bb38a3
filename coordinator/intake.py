"""The way from either front door to the brain and back: tokenize, check, submit; then tokens to text."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace

from baton import limits, log
from baton.clock import Clock, steady
from baton.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, Unavailable
from baton.generation_defaults import GenerationDefaults
from baton.limits import TextLimit
from baton.types import RequestId
from coordinator.answer import Answer, Choice, Echo
from coordinator.arriving_bodies import ArrivingBodies
from coordinator.ask import Ask, Prompt, check, check_timeout, prompts_of, to_submission, worded
from coordinator.chat_template import Conversation
from coordinator.generation import Generator, Submission
from coordinator.refusals import Refusals
from coordinator.telling import Teller
from coordinator.text_workers import TextWorkers
from coordinator.tokenizer import Text
from coordinator.unknown_fields import REFUSED, UnknownFields

QUANTIZATION = "none"  # of weights, in this version
_LOADING_RETRY = 1.0  # seconds
_log = log.get("front")


class Intake:
    """One per coordinator, shared by HTTP and gRPC. `text` completes when the tokenizer has loaded.
    `on_client_id` is told the id that a client gave its request, and the request's own."""

    def __init__(
        self,
        generator: Generator,
        text: asyncio.Future[Text],
        *,
        model: str,
        longest: float,
        refusals: Refusals,
        defaults: GenerationDefaults | None = None,
        unknown_fields: UnknownFields = REFUSED,
        workers: TextWorkers | None = None,
        bodies: ArrivingBodies | None = None,
        clock: Clock = steady,
        on_client_id: Callable[[str, RequestId], None] | None = None,
    ) -> None:
        self.refusals = refusals
        self.unknown_fields = unknown_fields
        self.bodies = bodies or ArrivingBodies()
        self.workers = workers or TextWorkers()
        self._generator = generator
        self._model = model
        self._text = text
        self._longest = longest
        self._defaults = defaults or GenerationDefaults()
        self._clock = clock
        self._on_client_id = on_client_id

    def time_limit(self, wanted: float | None, name: str = "timeout") -> float:
        """Seconds that a request may take: what its client asks, up to --request-timeout. Raises InvalidRequest."""
        return self._longest if wanted is None else min(check_timeout(wanted, name), self._longest)

    def served(self) -> tuple[str, int]:
        """The model's name and its longest context in tokens. Raises Unavailable while no node has joined."""
        return self._model, self._generator.bounds().max_context

    def identity(self) -> tuple[str, str, str]:
        """Digest of the model, dtype of its weights and cache, and their quantisation. Raises as `served`."""
        bounds = self._generator.bounds()
        return bounds.model_digest, bounds.dtype, QUANTIZATION

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound."""
        if name is not None and name != self._model:
            served = repr(self._model)
            raise ModelNotFound(f"model is {_shown(name)}: the model served here is {served}", param="model")

    async def start(self, ask: Ask) -> Answer:
        """Admit a request, all of its choices or none. Raises what the client did wrong (Rejected) or DeadlineExceeded;
        then nothing is held."""
        with self.refusals.counted(ask.standing.tenant_class), worded(ask.wording):
            self.check_model(ask.model)
            check(ask)
            self._generator.require_admission(ask.standing, ask.n * prompts_of(ask), self.time_limit(ask.timeout))
            text, firsts, echoes = await self._prepare(ask)
        submissions = [choice for first in firsts for choice in _choices(first, ask.n)]
        generations = await self._generator.submit_all(submissions)
        if ask.client_id is not None:
            _log.info("request", request=generations[0].id, client_request=ask.client_id)
            if self._on_client_id is not None:
                self._on_client_id(ask.client_id, generations[0].id)
        return Answer(
            model=self._model,
            created=int(time.time()),
            text=text,
            prompts=[first.prompt for first in firsts],
            choices=[
                Choice(generation, _teller(ask, text, index), index // ask.n)
                for index, generation in enumerate(generations)
            ],
            echoes=echoes,
            scored=ask.logprobs is not None,
            only_echo=ask.only_echo,
        )

    async def tokenize(
        self, wording: Prompt | Conversation, special: bool | None, limit: float
    ) -> tuple[Text, tuple[int, ...]]:
        """`special` None is as it is done for a request. Raises InvalidRequest, TooLong, Overloaded, DeadlineExceeded;
        Unavailable while no node has joined or the tokenizer loads."""
        most = limits.told_limit(self._generator.bounds())
        async with _within(limit):
            text = self._loaded()
            return text, await _encode(text, wording, most, special=special)

    async def detokenize(self, tokens: Sequence[int], limit: float) -> str:
        """Raises InvalidRequest, TooLong, Overloaded, DeadlineExceeded; Unavailable while no node has joined or the
        tokenizer loads."""
        bounds = self._generator.bounds()
        with worded({"prompt": "tokens"}):
            limits.told_limit(bounds).check_tokens(len(tokens))
        limits.check_ids("tokens", tokens, bounds)
        async with _within(limit):
            return await self._loaded().decode(tokens)

    def _loaded(self) -> Text:
        """Raises Unavailable until the tokenizer is there: what waits for it would hold prompts without any bound."""
        if not self._text.done():
            raise Unavailable("the tokenizer is still being loaded", retry_after=_LOADING_RETRY)
        return self._text.result()

    async def _prepare(self, ask: Ask) -> tuple[Text, list[Submission], list[Echo]]:
        """The first choice of each prompt, and the prompts to be given back."""
        assert ask.prompts is not None
        wordings: Sequence[Prompt | Conversation]
        wordings = [ask.prompts] if isinstance(ask.prompts, Conversation) else ask.prompts
        began = self._clock()
        limit = self.time_limit(ask.timeout)
        async with _within(limit):
            text = self._loaded()
            if ask.stop and not text.shows_text:
                raise InvalidRequest("stop is given, but tokens have no text here: use stop_token_ids", param="stop")
            prompts = await self._encode_all(text, wordings)
        left, bounds = max(limit - (self._clock() - began), 0.0), self._generator.bounds()
        firsts = []
        for number, prompt in enumerate(prompts):
            with _numbered(number, prompts):
                firsts.append(to_submission(ask, prompt, left, bounds, self._defaults))
            await asyncio.sleep(0)  # a prompt can be long, and there can be many
        if ask.echo and ask.logprobs is not None:
            limits.check_prompt_scores(sum(map(len, prompts)), ask.logprobs)
        echoed = zip(wordings, prompts, strict=True) if ask.echo else ()
        scored = ask.logprobs is not None
        return text, firsts, [await _echo(text, wording, prompt, placed=scored) for wording, prompt in echoed]

    async def _encode_all(self, text: Text, wordings: Sequence[Prompt | Conversation]) -> list[tuple[int, ...]]:
        """One after another, so that others have their turn between two of many prompts."""
        bounds = self._generator.bounds()
        most, prompts = limits.prompt_limit(bounds), list[tuple[int, ...]]()
        for number, wording in enumerate(wordings):
            with _numbered(number, wordings):
                if not isinstance(wording, str | Conversation):
                    limits.check_prompt_length(len(wording), bounds)
                prompt = await _encode(text, wording, most)
                limits.check_prompt_length(len(prompt), bounds)  # before any time goes into the others
                prompts.append(prompt)
            await asyncio.sleep(0)
        return prompts


def _numbered(number: int, all_of_them: Sequence[object]) -> AbstractContextManager[None]:
    """A refusal inside says which of several prompts it is about."""
    return worded({"prompt": f"prompt[{number}]"} if len(all_of_them) > 1 else {})


def _choices(first: Submission, n: int) -> Iterator[Submission]:
    """The scores of the prompt are the same for all."""
    yield first
    sampling = replace(first.sampling, prompt_logprobs=None)
    for number in range(1, n):
        yield replace(first, sampling=sampling, choice=first.choice + number)


async def _encode(
    text: Text, wording: Prompt | Conversation, limit: TextLimit, *, special: bool | None = None
) -> tuple[int, ...]:
    """A chat template writes the special tokens itself; around any other text go those that its model expects."""
    if isinstance(wording, Conversation):
        return await text.converse(wording, special=bool(special), limit=limit)
    if isinstance(wording, str):
        return await text.encode(wording, special=special is not False, limit=limit)
    return tuple(wording)


async def _echo(text: Text, wording: Prompt | Conversation, tokens: tuple[int, ...], *, placed: bool) -> Echo:
    """`placed`: where each token begins is asked for."""
    if isinstance(wording, str):
        return Echo(wording, await text.starts(wording) if placed else ())
    return Echo(*await text.describe(tokens))


def _teller(ask: Ask, text: Text, index: int) -> Teller:
    """An answer in a conversation is a text of its own; any other goes on with its prompt's."""
    return Teller(
        index,
        text.detokenizer(continuing=not isinstance(ask.prompts, Conversation)),
        stop=ask.stop,
        scored=ask.logprobs is not None,
        unsearched=ask.min_tokens or 0,
    )


@asynccontextmanager
async def _within(limit: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"the deadline of {limit:g} s passed before the prompt was tokenized") from None


def _shown(name: str) -> str:
    return repr(name if len(name) <= 64 else name[:61] + "...")
