"""Threads for work on text, so that a long text blocks neither the event loop nor other clients.

The work must release Python's lock, as `encode_batch` of `tokenizers` does, or hold it for short
times only, as Python code does. Long texts have separate threads, so short ones never wait for
them. Within a lane, smaller texts go first, unless a larger one has waited long. Pending work is
bounded in bytes, for short and long texts separately.

The bound on the tokens of a text is checked before and while it is encoded. `encode_batch_fast` of
`tokenizers` releases Python's lock while it works, unlike `encode`, but its result is freed under
the lock. So a text that could be far too long is first encoded in slices, until they have more than
twice the allowed tokens. A cut changes only the tokens next to it, so such a text is too long
however it is cut.
"""

import asyncio
import heapq
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import tokenizers

from baton.errors import Overloaded
from baton.limits import MAX_PENDING_LONG_TEXT_BYTES, MAX_PENDING_SHORT_TEXT_BYTES, TextLimit
from baton.process.clock import Clock, monotonic_clock
from coordinator.text.byte_alphabet import CHAR_TO_BYTE

MAX_INLINE_BYTES = 2 << 10  # shorter than the switch to a thread: done on the event loop
MAX_SHORT_BYTES = 64 << 10  # longer texts have separate threads
_LONG_THREADS = 2
# For so many seconds per byte of a text, smaller texts may overtake it.
_SHORT_AGING_SECONDS_PER_BYTE = 2e-4
_LONG_AGING_SECONDS_PER_BYTE = 1e-5
_RETRY_SECONDS = 1.0  # after which a refused client may try again

Result = TypeVar("Result")


class TextWorkers:
    """The text threads of one coordinator."""

    def __init__(
        self,
        max_short_bytes: int = MAX_PENDING_SHORT_TEXT_BYTES,
        max_long_bytes: int = MAX_PENDING_LONG_TEXT_BYTES,
        clock: Clock = monotonic_clock,
    ) -> None:
        self._short = _WorkerLane(
            "text-short", 1, max_short_bytes, _SHORT_AGING_SECONDS_PER_BYTE, clock
        )
        self._long = _WorkerLane(
            "text-long", _LONG_THREADS, max_long_bytes, _LONG_AGING_SECONDS_PER_BYTE, clock
        )

    @property
    def pending_bytes(self) -> int:
        """Bytes of text that wait for a thread or are being processed."""
        return self._short.pending_bytes + self._long.pending_bytes

    async def run_work(self, work: Callable[[], Result], size: int) -> Result:
        """Return the result of `work`, which processes a text of `size` bytes.

        Raises Overloaded when too much text waits, and what `work` raises. Work that has started
        continues when the caller is cancelled.
        """
        if size <= MAX_INLINE_BYTES:
            return work()
        lane = self._short if size <= MAX_SHORT_BYTES else self._long
        result: Result = await lane.run_work(work, size)
        return result


@dataclass(order=True, slots=True)
class _TextJob:
    """One piece of work that waits for a thread."""

    starts_by: float  # monotonic seconds; jobs that arrive later cannot overtake it
    serial: int
    size_bytes: int = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    result: "asyncio.Future[Any]" = field(compare=False)


class _WorkerLane:
    """Some threads, and the jobs that wait for one of them."""

    def __init__(
        self, name: str, threads: int, max_bytes: int, aging_seconds_per_byte: float, clock: Clock
    ) -> None:
        self.pending_bytes = 0  # of waiting and running jobs
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free_threads = threads
        self._clock = clock
        self._max_pending_bytes = max_bytes
        self._aging_seconds_per_byte = aging_seconds_per_byte
        self._waiting: list[_TextJob] = []
        self._serial = count()

    async def run_work(self, work: Callable[[], Any], size: int) -> Any:
        if self.pending_bytes and self.pending_bytes + size > self._max_pending_bytes:
            raise Overloaded(
                f"{self.pending_bytes} bytes of text wait to be tokenized and {size} more would "
                "come: the limit is "
                f"{self._max_pending_bytes} for texts of this length",
                retry_after=_RETRY_SECONDS,
            )
        self.pending_bytes += size
        loop = asyncio.get_running_loop()
        due = self._clock() + size * self._aging_seconds_per_byte
        job = _TextJob(due, next(self._serial), size, work, loop.create_future())
        heapq.heappush(self._waiting, job)
        self._start_waiting(loop)
        try:
            return await job.result
        except asyncio.CancelledError:
            if job in self._waiting:
                self._waiting.remove(job)
                heapq.heapify(self._waiting)
                self.pending_bytes -= size
            raise

    def _start_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting and self._free_threads:
            job = heapq.heappop(self._waiting)
            self._free_threads -= 1
            self._start_job(job, loop)

    def _start_job(self, job: _TextJob, loop: asyncio.AbstractEventLoop) -> None:
        def ended(done: "Future[Any]") -> None:
            with suppress(RuntimeError):  # the loop is closed: no caller waits
                loop.call_soon_threadsafe(self._finish_job, job, done, loop)

        self._executor.submit(job.work).add_done_callback(ended)

    def _finish_job(
        self, job: _TextJob, done: "Future[Any]", loop: asyncio.AbstractEventLoop
    ) -> None:
        self._free_threads += 1
        self.pending_bytes -= job.size_bytes
        error = done.exception()
        if not job.result.done():  # else its caller was cancelled
            if error is None:
                job.result.set_result(done.result())
            else:
                job.result.set_exception(error)
        self._start_waiting(loop)


SLICE_CHARS = 64 << 10
ALWAYS_SMALL_BYTES = 256 << 10  # the tokens of so much text are freed within milliseconds
_NFC_SHRINK_FACTOR = 3  # NFC makes a text at most so many times shorter, in bytes
# Pre-tokenizers that drop no text (Split only if it removes nothing).
_LOSSLESS_PRE_TOKENIZERS = {"Split", "ByteLevel", "Digits"}


class BoundedEncoder:
    """Encodes with one tokenizer. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._longest_token_bytes = longest_token_bytes(backend)

    def check_byte_size(self, size: int, limit: TextLimit) -> None:
        """Raises ContextLengthExceeded if no encoding of a text of `size` bytes can fit."""
        limit.check_byte_count(size, self._longest_token_bytes)

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


def longest_token_bytes(backend: tokenizers.Tokenizer) -> int | None:
    """Return the most bytes of text that one token stands for, or None without a known bound.

    There is none if the tokenizer drops text, or has one token for any unknown word.
    """
    parts: dict[str, Any] = {
        name: _part_settings(getattr(backend, name)) for name in ("normalizer", "pre_tokenizer")
    }
    shrinks = _normalizer_shrink_factor(parts["normalizer"])
    vocabulary, added = (
        backend.get_vocab(with_added_tokens=False),
        backend.get_added_tokens_decoder().values(),
    )
    if (
        shrinks is None
        or not _is_byte_level(parts["pre_tokenizer"])
        or not vocabulary.keys() >= CHAR_TO_BYTE.keys()
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    return shrinks * max(
        *map(len, vocabulary), *(utf8_size(token.content) for token in added), 1, 1
    )


def _part_settings(part: Any) -> Any:
    """Return a part of a tokenizer as its file has it, or None."""
    return None if part is None else json.loads(part.__getstate__())


def _normalizer_shrink_factor(normalizer: Any) -> int | None:
    """Return by what factor a normalizer may shorten a text, or None if that is unknown."""
    if normalizer is None:
        return 1
    return _NFC_SHRINK_FACTOR if normalizer["type"] == "NFC" else None


def _is_byte_level(pre_tokenizer: Any) -> bool:
    """Whether a token represents every byte of a text."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    kinds = {step and step["type"] for step in steps}
    removes = any(step and step.get("behavior", "Isolated") != "Isolated" for step in steps)
    return "ByteLevel" in kinds and kinds <= _LOSSLESS_PRE_TOKENIZERS and not removes
