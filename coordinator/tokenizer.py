"""Text to token ids and back for the served model, without touching a tensor.

A model without a tokenizer (or the paced engine) is served by token ids alone. How one is loaded:
`tokenizer_files.py`.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import NoReturn, Protocol, TypeVar

import tokenizers
from tokenizers import processors

from baton.errors import InvalidRequest
from coordinator.chat_template import ChatTemplate, Conversation
from coordinator.detokenizer import Detokenizer, Vocabulary
from coordinator.spelled_tokens import SpelledTokens

INLINE_BYTES = 8 << 10  # longer prompts are encoded off the event loop; this many take about a millisecond
INLINE_TOKENS = 2048  # likewise for decoding them

Result = TypeVar("Result")


class Text(Protocol):
    """What the front doors need."""

    @property
    def shows_text(self) -> bool:
        """False: tokens have no text here."""
        ...

    async def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """With `special`, the tokens that the model expects around a text, as its files say. Raises InvalidRequest
        when there is no tokenizer."""
        ...

    async def starts(self, text: str) -> tuple[int, ...]:
        """For each token of `encode(text)`, the place in the text where it begins, in characters."""
        ...

    async def decode(self, tokens: Sequence[int]) -> str:
        """All of it, special tokens too. Raises InvalidRequest when there is no tokenizer."""
        ...

    async def converse(self, conversation: Conversation, *, special: bool = False) -> tuple[int, ...]:
        """The prompt of a conversation, in which special tokens are what its template writes and nothing that a message
        spells. `special` adds those around a text, which most templates write already. Raises InvalidRequest when there
        is no chat template, or when it refuses."""
        ...

    def detokenizer(self, *, continuing: bool = False) -> Detokenizer:
        """`continuing`: the tokens follow others; else they begin a text."""
        ...

    def token_text(self, token: int) -> str:
        """One token by itself, in words that no other token has as far as possible."""
        ...

    def token_bytes(self, token: int) -> bytes | None:
        """What it stands for; None if that is no text."""
        ...

    async def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Each as the vocabulary spells it."""
        ...


class NoTokenizer:
    """Token ids only: text is refused for `reason`, and output text is empty."""

    shows_text = False

    def __init__(self, reason: str) -> None:
        self.reason = reason

    async def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        self._refuse("prompt is text", "prompt", ": send token ids")

    async def starts(self, text: str) -> tuple[int, ...]:
        self._refuse("prompt is text", "prompt", ": send token ids")

    async def decode(self, tokens: Sequence[int]) -> str:
        self._refuse("tokens are to be text", "tokens")

    async def converse(self, conversation: Conversation, *, special: bool = False) -> tuple[int, ...]:
        self._refuse("messages are text", "messages", ": send a prompt of token ids to /v1/completions")

    def detokenizer(self, *, continuing: bool = False) -> Detokenizer:
        return _Silent()

    def token_text(self, token: int) -> str:
        return _nameless(token)

    def token_bytes(self, token: int) -> bytes | None:
        return None

    async def pieces(self, tokens: Sequence[int]) -> list[str]:
        return list(map(_nameless, tokens))

    def _refuse(self, given: str, field: str, remedy: str = "") -> NoReturn:
        raise InvalidRequest(f"{given}, but {self.reason}{remedy}", param=field)


class _Silent:
    def add(self, tokens: object) -> str:
        return ""

    def flush(self) -> str:
        return ""


class HfTokenizer:
    """A fast tokenizer. Its backend is used directly: it is immutable once loaded, so threads may share it, where
    the wrapper rewrites truncation and padding settings at every call."""

    shows_text = True

    def __init__(self, backend: tokenizers.Tokenizer, bos: int | None, template: ChatTemplate | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        _keep_spaces(backend.post_processor)
        self._backend = backend
        self._bos = bos
        self._template = template
        self._spelled = SpelledTokens(backend)
        self._vocabulary = Vocabulary(backend)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        def encode() -> tuple[int, ...]:
            encoding = self._backend.encode(text, add_special_tokens=special)
            return tuple(encoding.ids[self._surplus(encoding.ids) :])

        return await self._do(encode, inline=len(text) <= INLINE_BYTES)

    async def starts(self, text: str) -> tuple[int, ...]:
        def encode() -> tuple[int, ...]:
            encoding = self._backend.encode(text, add_special_tokens=True)
            return tuple(_starts(encoding.offsets[self._surplus(encoding.ids) :]))

        return await self._do(encode, inline=len(text) <= INLINE_BYTES)

    async def decode(self, tokens: Sequence[int]) -> str:
        def decode() -> str:
            return self._backend.decode(list(tokens), skip_special_tokens=False)

        return await self._do(decode, inline=len(tokens) <= INLINE_TOKENS)

    async def converse(self, conversation: Conversation, *, special: bool = False) -> tuple[int, ...]:
        template = self._template
        if template is None:
            raise InvalidRequest(
                "messages need a chat template, and the model has none: send a prompt to /v1/completions",
                param="messages",
            )

        def encode() -> tuple[int, ...]:
            hidden, marks = self._spelled.hide(conversation)
            encoding = self._spelled.encode(self._backend, template.render(hidden), marks, special=special)
            return tuple(encoding.ids[self._surplus(encoding.ids) :])

        return await self._do(encode, inline=conversation.size <= INLINE_BYTES)

    def detokenizer(self, *, continuing: bool = False) -> Detokenizer:
        return self._vocabulary.detokenizer(continuing=continuing)

    def token_text(self, token: int) -> str:
        return self._vocabulary.token_text(token) or _nameless(token)

    def token_bytes(self, token: int) -> bytes | None:
        return self._vocabulary.token_bytes(token)

    async def pieces(self, tokens: Sequence[int]) -> list[str]:
        def look_up() -> list[str]:
            return [self._backend.id_to_token(token) or _nameless(token) for token in tokens]

        return await self._do(look_up, inline=len(tokens) <= INLINE_TOKENS)

    async def _do(self, work: Callable[[], Result], *, inline: bool) -> Result:
        return work() if inline else await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _surplus(self, ids: list[int]) -> int:
        """A text that begins with BOS by itself gets no second one."""
        return int(self._bos is not None and ids[:2] == [self._bos, self._bos])


def _starts(offsets: Sequence[tuple[int, int]]) -> Iterator[int]:
    """What stands for no text, as an end token, begins where the one before it ends."""
    reached = 0
    for begin, end in offsets:
        yield begin if begin < end else reached
        reached = max(reached, end)


def _keep_spaces(processor: object) -> None:
    """A byte-level token begins with its space, whatever the files say of offsets."""
    if isinstance(processor, processors.Sequence):
        with suppress(IndexError):  # it has no length
            for place in count():
                _keep_spaces(processor[place])
    elif isinstance(processor, processors.ByteLevel):
        processor.trim_offsets = False


def _nameless(token: int) -> str:
    return f"token_id:{token}"
