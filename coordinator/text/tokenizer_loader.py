"""Loads the tokenizer of a model from its files.

The `tokenizers` library reads `tokenizer.json`; `tokenizer_config.json` adds which token begins a
text, and the chat template. Models without `tokenizer.json` are loaded by `transformers`, whose
import takes seconds and 300 MB.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from baton.errors import ConfigError
from baton.process import log
from coordinator.text.chat_template import ChatTemplate
from coordinator.text.text_workers import TextWorkers
from coordinator.text.tokenizer import HfTokenizer, NoTokenizer, Tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_log = log.get_logger("tokenizer")


async def load_tokenizer(model: str, engine: str, workers: TextWorkers | None = None) -> Tokenizer:
    """Load the tokenizer of a model folder or of a model in the local Hugging Face cache.

    `workers` process long texts. Raises ConfigError when files exist but cannot be used.
    """
    if engine == "paced":
        return NoTokenizer("the paced engine has no tokenizer")
    return await asyncio.to_thread(_load_in_thread, model, workers)


def _load_in_thread(model: str, workers: TextWorkers | None) -> Tokenizer:
    folder = Path(model)
    if not model or (
        folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZER_FILES)
    ):
        return NoTokenizer(f"{folder.name or 'the model'} has no tokenizer files")
    try:
        text = _from_files(folder, workers) or _from_transformers(model, workers)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        first_line = (
            str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        )
        raise ConfigError(
            f"the tokenizer of {model} cannot be loaded ({first_line}): check its files"
        ) from error
    _log.info("tokenizer loaded", model=model)
    return text


def _from_files(folder: Path, workers: TextWorkers | None) -> HfTokenizer | None:
    """Return None if the files alone do not determine how the tokenizer works."""
    file, settings_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not file.exists():
        return None
    settings = json.loads(settings_file.read_text()) if settings_file.exists() else {}
    if not isinstance(settings, dict):
        raise ValueError("tokenizer_config.json is not a JSON object")
    if "auto_map" in settings:  # a class of the model's own, which transformers refuses by name
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises this very class
        raise ValueError(f"tokenizer.json: {error}") from None
    special = {
        name: content
        for name in ("bos_token", "eos_token")
        if (content := _special_token_text(settings.get(name)))
    }
    bos = backend.token_to_id(special["bos_token"]) if "bos_token" in special else None
    if not _settings_match_backend(backend, bos, settings):
        return None
    return HfTokenizer(
        backend,
        bos,
        _build_template(_read_template_source(folder, settings), special),
        workers,
        settings
        | {
            name: _special_token_text(value)
            for name, value in settings.items()
            if name.endswith("_token") and isinstance(value, dict)
        },
    )


def _settings_match_backend(
    backend: tokenizers.Tokenizer, bos: int | None, settings: Mapping[str, Any]
) -> bool:
    """Whether tokenizer.json adds BOS and EOS as tokenizer_config.json says.

    Some classes of transformers follow the latter.
    """
    ids = backend.encode("").ids
    begins, wanted = bos is not None and ids[:1] == [bos], settings.get("add_bos_token")
    if wanted is not None and bos is not None and begins != wanted:
        return False
    eos = backend.token_to_id(_special_token_text(settings.get("eos_token")) or "")
    return not settings.get("add_eos_token") or (eos is not None and ids[-1:] == [eos])


def _read_template_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the model's default template; chat_template.jinja takes precedence."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    source = settings.get("chat_template")
    if isinstance(source, list):  # named templates
        source = next((one.get("template") for one in source if one.get("name") == "default"), None)
    return source if isinstance(source, str) else None


def _build_template(source: str | None, special: Mapping[str, str]) -> ChatTemplate | None:
    return None if source is None else ChatTemplate(source, special)


def _special_token_text(token: object) -> str | None:
    """Return the text of a special token, which may be given as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _from_transformers(model: str, workers: TextWorkers | None) -> HfTokenizer:
    from transformers import AutoTokenizer  # imported here, because it is slow and rarely needed

    loaded = AutoTokenizer.from_pretrained(
        model, local_files_only=True, trust_remote_code=False, use_fast=True
    )
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ConfigError(
            f"the tokenizer of {model} has no fast form: convert it to tokenizer.json"
        )
    source = loaded.chat_template
    if isinstance(source, dict):
        source = source.get("default")
    special = {
        name: token for name, token in loaded.special_tokens_map.items() if isinstance(token, str)
    }
    settings = {name: value for name, value in loaded.init_kwargs.items() if _is_shown(name, value)}
    return HfTokenizer(
        backend, loaded.bos_token_id, _build_template(source, special), workers, settings | special
    )


def _is_shown(name: str, value: object) -> bool:
    """Whether clients may read a setting; paths of this machine are left out."""
    is_path = name == "name_or_path" or name.endswith("_file")
    return not is_path and (value is None or isinstance(value, str | int | float))
