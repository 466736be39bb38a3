"""Checks of the model: its configuration and weights, and the files of its tokenizer."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.cli.checks.finding import Finding, bad_finding, ok_finding, warning_finding
from baton.cli.common.default_model import find_default_model
from baton.config.settings import Config
from baton.errors import ConfigError
from baton.models.model_source import is_hub_id, require_model_folder

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TOKENIZER_FIX = (
    "copy tokenizer.json and tokenizer_config.json from the model's source; "
    "without them only token ids work"
)


def probe_arguments(config: Config) -> list[str]:
    """Return the arguments with which node_engine/probe.py checks the configured model folder."""
    if not is_local_model(config):
        return []
    return [config.model, "config"] if config.load_format == "dummy" else [config.model]


def is_local_model(config: Config) -> bool:
    return config.engine == "model" and os.path.isdir(config.model)


def check_model(config: Config, found: Mapping[str, Any]) -> list[Finding]:
    """Check the model and its tokenizer. `found` is the result of `run_node_probe`."""
    if config.engine != "model":
        return [ok_finding("model", f"none: --engine {config.engine}")]
    if not config.model:
        return [check_bundled_model()]
    if is_hub_id(config.model):
        detail = f"{config.model} is not a folder: it is downloaded from the hub at the first start"
        return [warning_finding("model", detail, "give --model a folder to need no network")]
    try:
        require_model_folder(config.model, "--model", "model")
    except ConfigError as error:
        fix = "give --model the path of a Hugging Face folder"
        return [bad_finding("model", error.message, fix)]
    problem = found.get("model", "it could not be looked at: see torch")
    if problem:
        return [
            bad_finding(
                "model",
                str(problem),
                "see the message; download the model again if files are damaged",
            )
        ]
    return [
        ok_finding("model", f"{config.model}: configuration and weights are sound"),
        check_tokenizer(Path(config.model)),
    ]


def check_bundled_model() -> Finding:
    """Check the model that `baton up` serves when none is named; an installed wheel has none."""
    try:
        find_default_model()
    except ConfigError as error:
        return bad_finding(
            "model", error.message, "give --model the path of a Hugging Face folder, or a hub id"
        )
    return ok_finding("model", "none named: `baton up` serves its own small one")


def check_tokenizer(folder: Path) -> Finding:
    present = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        return warning_finding(
            "tokenizer", f"{folder} has none of {', '.join(_TOKENIZER_FILES)}", _TOKENIZER_FIX
        )
    return ok_finding("tokenizer", ", ".join(present))
