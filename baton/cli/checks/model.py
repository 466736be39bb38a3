"""The model: its configuration and weights, by the code that will load them, and its tokenizer's
files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.cli.checks.finding import Finding, bad_finding, ok_finding, warning_finding
from baton.cli.common.default_model import find_default_model
from baton.config.settings import Config
from baton.errors import ConfigError
from baton.models.model_source import is_hub_id

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TOKENIZER_FIX = "copy tokenizer.json and tokenizer_config.json from the model's source; without them only token ids work"


def probe_arguments(config: Config) -> list[str]:
    """What node_engine/probe.py is to look at."""
    if not is_local_model(config):
        return []
    return [config.model, "config"] if config.load_format == "dummy" else [config.model]


def is_local_model(config: Config) -> bool:
    return config.engine == "model" and Path(config.model).is_dir() and bool(config.model)


def check_model(config: Config, found: Mapping[str, Any]) -> list[Finding]:
    """`found` is what the probe said."""
    if config.engine != "model":
        return [ok_finding("model", f"none: --engine {config.engine}")]
    if not config.model:
        return [check_bundled_model()]
    if not Path(config.model).exists():
        if is_hub_id(config.model):
            told = (
                f"{config.model} is no folder here: the first start downloads it from the model hub"
            )
            return [warning_finding("model", told, "give --model a folder to need no network")]
        return [
            bad_finding(
                "model",
                f"there is no {config.model}",
                "give --model the path of a Hugging Face folder",
            )
        ]
    wrong = found.get("model", "it could not be looked at: see torch")
    if wrong:
        return [
            bad_finding(
                "model",
                str(wrong),
                "see the message; download the model again if files are damaged",
            )
        ]
    return [
        ok_finding("model", f"{config.model}: configuration and weights are sound"),
        check_tokenizer(Path(config.model)),
    ]


def check_bundled_model() -> Finding:
    """What `baton up` serves when no model is named. An installed wheel has none."""
    try:
        find_default_model()
    except ConfigError as error:
        return bad_finding(
            "model", error.message, "give --model the path of a Hugging Face folder, or a hub id"
        )
    return ok_finding("model", "none named: `baton up` serves its own small one")


def check_tokenizer(folder: Path) -> Finding:
    there = [name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not there:
        return warning_finding(
            "tokenizer", f"{folder} has none of {', '.join(_TOKENIZER_FILES)}", _TOKENIZER_FIX
        )
    return ok_finding("tokenizer", ", ".join(there))
