"""Text to token ids and back for the served model, without touching a tensor.

Importing and loading take seconds, so they happen in a thread while nodes join; a model without a tokenizer (or the
paced engine) is served by token ids alone.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import tokenizers

from baton import log
from baton.errors import ConfigError, InvalidRequest
from coordinator.detokenizer import Detokenizer, Vocabulary

INLINE_BYTES = 8 << 10  # longer prompts are encoded off the event loop; this many take about a millisecond
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_log = log.get("tokenizer")


class Text(Protocol):
    """What the front doors need."""

    async def encode(self, text: str) -> tuple[int, ...]:
        """Raises InvalidRequest when there is no tokenizer."""
        ...

    def detokenizer(self) -> Detokenizer: ...


class NoTokenizer:
    """Token ids only: text prompts are refused for `reason`, and output text is empty."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    async def encode(self, text: str) -> tuple[int, ...]:
        raise InvalidRequest(f"prompt is text, but {self.reason}: send token ids", param="prompt")

    def detokenizer(self) -> Detokenizer:
        return _Silent()


class _Silent:
    def add(self, tokens: object) -> str:
        return ""

    def flush(self) -> str:
        return ""


class HfTokenizer:
    """A fast tokenizer. Its backend is used directly: it is immutable once loaded, so threads may share it, where
    the wrapper rewrites truncation and padding settings at every call."""

    def __init__(self, backend: tokenizers.Tokenizer, bos: int | None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bos = bos
        self._vocabulary = Vocabulary(backend)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def encode(self, text: str) -> tuple[int, ...]:
        if len(text) <= INLINE_BYTES:
            return self._encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, text)

    def detokenizer(self) -> Detokenizer:
        return self._vocabulary.detokenizer()

    def _encode(self, text: str) -> tuple[int, ...]:
        """Special tokens as the tokenizer's own files say; a prompt that already begins with BOS gets no second."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=True).ids
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            del ids[0]
        return tuple(ids)


async def load(model: str, engine: str) -> Text:
    """The tokenizer of a model folder or of a model in the local Hugging Face cache.

    Raises ConfigError when files are there but cannot be used.
    """
    if engine == "paced":
        return NoTokenizer("the paced engine has no tokenizer")
    return await asyncio.to_thread(_load, model)


def _load(model: str) -> Text:
    folder = Path(model)
    if not model or (folder.is_dir() and not any((folder / name).exists() for name in _FILES)):
        return NoTokenizer(f"{folder.name or 'the model'} has no tokenizer files")
    from transformers import AutoTokenizer  # takes seconds: here, only a process with a tokenizer pays them

    try:
        loaded = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False, use_fast=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"the tokenizer of {model} cannot be loaded ({first_line}): check its files") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ConfigError(f"the tokenizer of {model} has no fast form: convert it to tokenizer.json")
    _log.info("tokenizer loaded", model=model, vocabulary=backend.get_vocab_size(), kind=type(loaded).__name__)
    return HfTokenizer(backend, loaded.bos_token_id)
