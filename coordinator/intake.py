"""The way from either front door to the brain and back: tokenize, check, submit; then tokens to text."""

import asyncio
import time
from dataclasses import dataclass, field

from baton import log
from baton.clock import Clock, steady
from baton.errors import DeadlineExceeded, InvalidRequest, ModelNotFound
from baton.types import RequestId
from coordinator.ask import Ask, check_timeout, to_submission
from coordinator.detokenizer import Detokenizer
from coordinator.generation import Generation, Generator, Submission
from coordinator.refusals import Refusals
from coordinator.tokenizer import Text

_log = log.get("front")


@dataclass(slots=True)
class Running:
    """A submitted request and what its client has been told so far."""

    generation: Generation
    model: str
    prompt_tokens: int
    detokenizer: Detokenizer
    created: int  # seconds since the epoch, for clients to read
    completion_tokens: int = field(default=0)

    @property
    def id(self) -> RequestId:
        return self.generation.id

    def text_of(self, tokens: tuple[int, ...]) -> str:
        """Count the tokens of one event and return the text they complete."""
        self.completion_tokens += len(tokens)
        return self.detokenizer.add(tokens)


class Intake:
    """One per coordinator, shared by HTTP and gRPC. `text` completes when the tokenizer has loaded."""

    def __init__(
        self,
        generator: Generator,
        text: asyncio.Future[Text],
        *,
        model: str,
        longest: float,
        refusals: Refusals,
        clock: Clock = steady,
    ) -> None:
        self.refusals = refusals
        self._generator = generator
        self._model = model
        self._text = text
        self._longest = longest
        self._clock = clock

    def time_limit(self, wanted: float | None, name: str = "timeout") -> float:
        """Seconds that a request may take: what its client asks, up to --request-timeout. Raises InvalidRequest."""
        return self._longest if wanted is None else min(check_timeout(wanted, name), self._longest)

    def served(self) -> tuple[str, int]:
        """The model's name and its longest context in tokens. Raises Unavailable while no node has joined."""
        return self._model, self._generator.bounds().max_context

    async def start(self, ask: Ask) -> Running:
        """Admit a request. Raises what the client did wrong (Rejected) or DeadlineExceeded; then nothing is held."""
        with self.refusals.counted():
            text, submission = await self._prepare(ask)
        generation = await self._generator.submit(submission)
        if ask.client_id is not None:
            _log.info("request", request=generation.id, client_request=ask.client_id)
        return Running(
            generation=generation,
            model=self._model,
            prompt_tokens=len(submission.prompt),
            detokenizer=text.detokenizer(),
            created=int(time.time()),
        )

    async def _prepare(self, ask: Ask) -> tuple[Text, Submission]:
        if ask.model is not None and ask.model != self._model:
            served = repr(self._model)
            raise ModelNotFound(f"model is {_shown(ask.model)}: the model served here is {served}", param="model")
        if ask.prompt is None:
            raise InvalidRequest("prompt is missing: it must be text or token ids", param="prompt")
        began = self._clock()
        limit = self.time_limit(ask.timeout)
        try:
            async with asyncio.timeout(limit):
                text = await asyncio.shield(self._text)
                prompt = await text.encode(ask.prompt) if isinstance(ask.prompt, str) else tuple(ask.prompt)
        except TimeoutError:
            raise DeadlineExceeded(f"the deadline of {limit:g} s passed before the prompt was tokenized") from None
        left = max(limit - (self._clock() - began), 0.0)
        return text, to_submission(ask, prompt, left, self._generator.bounds())


def _shown(name: str) -> str:
    return repr(name if len(name) <= 64 else name[:61] + "...")
