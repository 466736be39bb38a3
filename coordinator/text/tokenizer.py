"""Converts text to token ids and back for the served model.

A model without a tokenizer (or the paced engine) is served by token ids alone. Tokenizers are
loaded in `tokenizer_loader.py`.

The bound on the tokens of a text is checked before and while it is encoded. `encode_batch_fast` of
`tokenizers` releases Python's lock while it works, unlike `encode`, but its result is freed under
the lock. So a text that could be far too long is first encoded in slices, until they have more than
twice the allowed tokens. A cut changes only the tokens next to it, so such a text is too long
however it is cut.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from types import MappingProxyType
from typing import NoReturn, Protocol

import tokenizers
from tokenizers import processors

from baton.errors import InvalidRequest
from baton.limits import TextLimit, check_message_count
from coordinator.text.byte_alphabet import longest_token_bytes
from coordinator.text.chat_template import ChatPrompt, ChatTemplate
from coordinator.text.detokenizer import IncrementalDetokenizer, Vocabulary
from coordinator.text.special_token_escaper import SLICE_CHARS, SpecialTokenEscaper
from coordinator.text.text_workers import Result, TextWorkers

DECODE_BYTES_PER_TOKEN = 4  # of text, by which the work to decode a token is estimated
MAX_INLINE_BYTES = 2 << 10  # shorter than the switch to a thread: done on the event loop
ALWAYS_SMALL_BYTES = 256 << 10  # the tokens of so much text are freed within milliseconds
NO_TEXT_LIMIT = TextLimit(2**62, "none is set")


class Tokenizer(Protocol):
    """What the front ends need of a tokenizer."""

    @property
    def has_text(self) -> bool:
        """False if there is no tokenizer, so that tokens have no text."""
        ...

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: TextLimit = NO_TEXT_LIMIT
    ) -> tuple[int, ...]:
        """Encode a text, by default with the special tokens that the model expects around it.

        Raises InvalidRequest without a tokenizer, ContextLengthExceeded as soon as the text is
        found to be far beyond `limit`, and Overloaded when too much text waits.
        """
        ...

    async def compute_token_offsets(self, text: str) -> tuple[int, ...]:
        """Return where each token of `encode(text)` begins in the text, in characters."""
        ...

    async def decode(self, tokens: Sequence[int]) -> str:
        """Return the text, with special tokens. Raises InvalidRequest without a tokenizer."""
        ...

    async def encode_chat(
        self,
        conversation: ChatPrompt,
        *,
        add_special_tokens: bool = False,
        limit: TextLimit = NO_TEXT_LIMIT,
    ) -> tuple[int, ...]:
        """Encode a conversation with the model's chat template.

        Only the template writes special tokens; those that messages spell are plain text.
        `add_special_tokens` adds those around a text, which most templates write already. Raises
        InvalidRequest without a chat template or when it refuses the messages, and the errors of
        `encode`.
        """
        ...

    async def decode_with_offsets(self, tokens: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of tokens as in an output, and where each token begins in it."""
        ...

    @property
    def chat_template_source(self) -> str | None:
        """The text of the model's chat template, None without one."""
        ...

    @property
    def settings(self) -> Mapping[str, object]:
        """What the model's tokenizer_config.json says; empty without a tokenizer."""
        ...

    def create_detokenizer(
        self, *, is_continuation: bool = False, shown_special: frozenset[str] = frozenset()
    ) -> IncrementalDetokenizer:
        """`is_continuation`: the tokens continue a text, instead of beginning one.

        Special tokens have no text, except those named in `shown_special`.
        """
        ...

    def token_text(self, token: int) -> str:
        """Return the text of one token by itself, unique if possible."""
        ...

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token stands for, or None if it is no text."""
        ...

    async def get_token_strings(self, tokens: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary spells it."""
        ...


class NoTokenizer:
    """Token ids only: text is refused for `reason`, and output text is empty."""

    has_text = False
    chat_template_source: str | None = None
    settings: Mapping[str, object] = MappingProxyType({})

    def __init__(self, reason: str) -> None:
        self.reason = reason

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: TextLimit = NO_TEXT_LIMIT
    ) -> tuple[int, ...]:
        self._raise_no_tokenizer("prompt is text", "prompt", ": send token ids")

    async def compute_token_offsets(self, text: str) -> tuple[int, ...]:
        self._raise_no_tokenizer("prompt is text", "prompt", ": send token ids")

    async def decode(self, tokens: Sequence[int]) -> str:
        self._raise_no_tokenizer("tokens are to be text", "tokens")

    async def encode_chat(
        self,
        conversation: ChatPrompt,
        *,
        add_special_tokens: bool = False,
        limit: TextLimit = NO_TEXT_LIMIT,
    ) -> tuple[int, ...]:
        self._raise_no_tokenizer(
            "messages are text", "messages", ": send a prompt of token ids to /v1/completions"
        )

    async def decode_with_offsets(self, tokens: Sequence[int]) -> tuple[str, list[int]]:
        return "", [0] * len(tokens)

    def create_detokenizer(
        self, *, is_continuation: bool = False, shown_special: frozenset[str] = frozenset()
    ) -> IncrementalDetokenizer:
        return _NullDetokenizer()

    def token_text(self, token: int) -> str:
        return _token_id_string(token)

    def token_bytes(self, token: int) -> bytes | None:
        return None

    async def get_token_strings(self, tokens: Sequence[int]) -> list[str]:
        return list(map(_token_id_string, tokens))

    def _raise_no_tokenizer(self, given: str, field: str, remedy: str = "") -> NoReturn:
        raise InvalidRequest(f"{given}, but {self.reason}{remedy}", param=field)


class _NullDetokenizer:
    def append_tokens(self, tokens: object) -> str:
        return ""

    def flush(self) -> str:
        return ""


class BoundedEncoder:
    """Encodes with one tokenizer. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._longest_token_bytes = longest_token_bytes(backend)

    def check_size(self, text: str, limit: TextLimit) -> int:
        """Return the size of a text in bytes. Raises ContextLengthExceeded if no encoding of it can
        fit."""
        size = utf8_size(text)
        limit.check_byte_count(size, self._longest_token_bytes)
        return size

    def encode_text(self, text: str, limit: TextLimit, *, add_special_tokens: bool) -> list[int]:
        """Encode a text. Raises ContextLengthExceeded if it has over twice the allowed tokens.

        The caller checks the exact limit.
        """
        if 4 * len(text) > max(2 * limit.max_tokens, ALWAYS_SMALL_BYTES):
            self._check_in_slices(text, limit)
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_texts(self, texts: list[str], limit: TextLimit) -> Iterator[list[int]]:
        """Encode each text by itself, without special tokens. Raises as `encode_text`."""
        for text in texts:
            if 4 * len(text) > max(2 * limit.max_tokens, ALWAYS_SMALL_BYTES):
                self._check_in_slices(text, limit)
        for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False):
            yield encoding.ids

    def _check_in_slices(self, text: str, limit: TextLimit) -> None:
        tokens = 0
        for begin in range(0, len(text), SLICE_CHARS):
            (encoding,) = self._backend.encode_batch_fast(
                [text[begin : begin + SLICE_CHARS]], add_special_tokens=False
            )
            tokens += len(encoding)
            if tokens > 2 * limit.max_tokens + begin // SLICE_CHARS:
                raise limit.length_exceeded_error(limit.max_tokens, "more than ")


def utf8_size(text: str) -> int:
    """Return the size of a text in UTF-8, in bytes."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


class HfTokenizer:
    """A fast tokenizer of Hugging Face.

    Its backend is used directly, because it is immutable once loaded and thus thread-safe. The
    wrapper of transformers changes truncation and padding settings at every call.
    """

    has_text = True

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos: int | None,
        template: ChatTemplate | None = None,
        workers: TextWorkers | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.settings = settings or {}
        backend.no_truncation()
        backend.no_padding()
        _keep_spaces_in_offsets(backend.post_processor)
        self._backend = backend
        self._bos_token_id = bos
        self._template = template
        self._encoder = BoundedEncoder(backend)
        self._special_token_escaper = SpecialTokenEscaper(backend, self._encoder)
        self._vocabulary = Vocabulary(backend)
        self._workers = workers or TextWorkers()

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: TextLimit = NO_TEXT_LIMIT
    ) -> tuple[int, ...]:
        def encode() -> tuple[int, ...]:
            ids = self._encoder.encode_text(text, limit, add_special_tokens=add_special_tokens)
            return tuple(ids[self._duplicate_bos_count(ids) :])

        return await self._run_work(encode, self._encoder.check_size(text, limit))

    async def compute_token_offsets(self, text: str) -> tuple[int, ...]:
        def encode() -> tuple[int, ...]:
            (encoding,) = self._backend.encode_batch([text], add_special_tokens=True)
            return tuple(
                _start_offsets(encoding.offsets[self._duplicate_bos_count(encoding.ids) :])
            )

        return await self._run_work(encode, utf8_size(text))

    async def decode(self, tokens: Sequence[int]) -> str:
        def decode() -> str:
            (text,) = self._backend.decode_batch([list(tokens)], skip_special_tokens=False)
            return text

        return await self._run_work(decode, DECODE_BYTES_PER_TOKEN * len(tokens))

    async def encode_chat(
        self,
        conversation: ChatPrompt,
        *,
        add_special_tokens: bool = False,
        limit: TextLimit = NO_TEXT_LIMIT,
    ) -> tuple[int, ...]:
        template = self._template
        if template is None:
            raise InvalidRequest(
                "messages need a chat template, and the model has none: send a prompt to "
                "/v1/completions",
                param="messages",
            )

        def encode() -> tuple[int, ...]:
            hidden, marks = self._special_token_escaper.escape_chat(conversation)
            ids = self._special_token_escaper.encode_escaped(
                template.render(hidden), marks, limit, add_special_tokens=add_special_tokens
            )
            return tuple(ids[self._duplicate_bos_count(ids) :])

        check_message_count(len(conversation.messages))
        return await self._run_work(encode, conversation.render_bytes)

    async def decode_with_offsets(self, tokens: Sequence[int]) -> tuple[str, list[int]]:
        detokenizer = self.create_detokenizer()

        def decode() -> tuple[str, list[int]]:
            texts, starts, length = list[str](), list[int](), 0
            for token in tokens:
                starts.append(length)
                texts.append(detokenizer.append_tokens((token,)))
                length += len(texts[-1])
            return "".join(texts) + detokenizer.flush(), starts

        return await self._run_work(decode, DECODE_BYTES_PER_TOKEN * len(tokens))

    @property
    def chat_template_source(self) -> str | None:
        return None if self._template is None else self._template.source

    def create_detokenizer(
        self, *, is_continuation: bool = False, shown_special: frozenset[str] = frozenset()
    ) -> IncrementalDetokenizer:
        return self._vocabulary.create_detokenizer(
            is_continuation=is_continuation, shown_special=shown_special
        )

    def token_text(self, token: int) -> str:
        return self._vocabulary.token_text(token) or _token_id_string(token)

    def token_bytes(self, token: int) -> bytes | None:
        return self._vocabulary.token_bytes(token)

    async def get_token_strings(self, tokens: Sequence[int]) -> list[str]:
        def look_up() -> list[str]:
            return [self._backend.id_to_token(token) or _token_id_string(token) for token in tokens]

        return await self._run_work(look_up, DECODE_BYTES_PER_TOKEN * len(tokens))

    async def _run_work(self, work: Callable[[], Result], size: int) -> Result:
        """Do work on `size` bytes of text, on a thread if it takes longer than to switch to one."""
        return work() if size <= MAX_INLINE_BYTES else await self._workers.run_work(work, size)

    def _duplicate_bos_count(self, ids: list[int]) -> int:
        """Return 1 if the text itself begins with BOS, so that there are two, else 0."""
        return int(
            self._bos_token_id is not None and ids[:2] == [self._bos_token_id, self._bos_token_id]
        )


def _start_offsets(offsets: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yield where each token begins; one without text begins where the previous one ends."""
    reached = 0
    for begin, end in offsets:
        yield begin if begin < end else reached
        reached = max(reached, end)


def _keep_spaces_in_offsets(processor: object) -> None:
    """Make the offset of a byte-level token include its leading space."""
    if isinstance(processor, processors.Sequence):
        with suppress(IndexError):  # it has no length
            for place in count():
                _keep_spaces_in_offsets(processor[place])
    elif isinstance(processor, processors.ByteLevel):
        processor.trim_offsets = False


def _token_id_string(token: int) -> str:
    return f"token_id:{token}"
