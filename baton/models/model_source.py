"""Resolves --model to a local folder, downloading it from the Hugging Face hub if needed.

A process does so once, before it starts other processes or loads anything, so that the nodes of
`baton up` do not download the same model. The local cache is tried first: a start without a network
works, and a restart never changes the model.
"""

import dataclasses
import json
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from baton.config.common import ModelSourceConfig
from baton.errors import ConfigError

_C = TypeVar("_C", bound=ModelSourceConfig)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_METADATA_FILES = (
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
)  # configuration, tokenizer, chat template
_WEIGHT_FILE_PATTERNS = ("*.safetensors",)
_DUPLICATE_FORMATS = ("*/*", "consolidated*")  # the same model in other formats
_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def with_local_model(config: _C, *, weights: bool = True) -> _C:
    """Return `config` with a local folder as `model`, and with the name that clients use.

    With `weights` False the tensors of a hub model are not downloaded. May take minutes. Raises
    ConfigError.
    """
    if config.engine != "model":
        return config
    if not is_hub_id(config.model):
        if config.model:
            require_model_folder(config.model, "--model", "model")
        return config
    weights = weights and config.load_format != "dummy"
    folder = _download_from_hub(config.model, weights)
    return dataclasses.replace(
        config, model=str(folder), served_model_name=config.public_model_name
    )


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form org/name and is not an existing path."""
    # Unlike Path.exists, this does not raise for a path whose parent cannot be searched.
    return not os.path.exists(model) and _HUB_ID.fullmatch(model) is not None


def require_model_folder(model: str, flag: str, param: str) -> None:
    """Raise ConfigError, which names `flag`, unless `model` is a folder that can be read."""
    try:
        is_folder = stat.S_ISDIR(os.stat(model).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        is_folder = False
    except OSError as error:
        raise ConfigError(
            f"{flag} {model}: it cannot be read: {error.strerror}", param=param
        ) from None
    if not is_folder:
        raise ConfigError(
            f"{flag} {model}: there is no such folder, and it is not a hub id", param=param
        )
    if not os.access(model, os.R_OK | os.X_OK):
        raise ConfigError(
            f"{flag} {model}: it cannot be read: this user may not list and search the folder",
            param=param,
        )


def _download_from_hub(name: str, weights: bool) -> Path:
    # The import takes half a second, so only a process that needs the hub does it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [*_METADATA_FILES, *(_WEIGHT_FILE_PATTERNS if weights else ())]

    def snapshot(local: bool) -> Path:
        found = snapshot_download(
            name,
            allow_patterns=patterns,
            ignore_patterns=list(_DUPLICATE_FORMATS),
            local_files_only=local,
        )
        return Path(found)

    with suppress(LocalEntryNotFoundError):
        cached = snapshot(local=True)
        if _has_tokenizer(cached) and not _find_missing_file(cached, weights):
            return cached
    try:
        folder = snapshot(local=False)
    except Exception as error:  # includes errors of the hub's HTTP library, which change with it
        raise ConfigError(
            f"--model {name}: no such folder here, and {_describe_download_error(error)}",
            param="model",
        ) from error
    lacking = _find_missing_file(folder, weights)
    if lacking:
        raise ConfigError(
            f"--model {name}: {folder} lacks {lacking}: "
            "connect this machine, or choose another model"
        )
    return folder


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / file).exists() for file in _TOKENIZER_FILES)


def _find_missing_file(folder: Path, weights: bool) -> str:
    """Return a needed file that is missing, or "". Other programs may cache single files."""
    needed = ["config.json", *(_needed_weight_files(folder) if weights else ())]
    return next((file for file in needed if not (folder / file).exists()), "")


def _needed_weight_files(folder: Path) -> list[str]:
    try:
        homes = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({str(file) for file in homes})
    except FileNotFoundError:
        return ["model.safetensors"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []  # the code that loads the weights reports the error


def _describe_download_error(error: Exception) -> str:
    """Return the cause and its fix in one line."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return (
            "the hub asks for consent first: accept the terms on the model's page and set HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return "the hub shows no such model: check the name, or set HF_TOKEN if it is private"
    if isinstance(error, LocalEntryNotFoundError):
        if isinstance(error.__cause__, OfflineModeIsEnabled):
            return (
                "HF_HUB_OFFLINE forbids to download it: unset that, "
                f"or put the model into the cache {HF_HUB_CACHE}"
            )
        return (
            f"the hub cannot be reached ({_first_line(error.__cause__ or error)}): "
            f"connect this machine, put the model into the cache {HF_HUB_CACHE}, or name a folder"
        )
    if isinstance(error, OSError) and not isinstance(error, HfHubHTTPError):
        return (
            f"it cannot be written to the cache {HF_HUB_CACHE} ({_first_line(error)}): "
            "set HF_HOME to another folder"
        )
    return f"it cannot be downloaded ({_first_line(error)}): try again, or name a folder"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
