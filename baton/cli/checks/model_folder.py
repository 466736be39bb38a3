"""The model: its configuration and weights, by the code that will load them, and its tokenizer's files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.cli.checks.finding import Finding, bad, ok, warning
from baton.cli.default_model import default_model
from baton.config import Config
from baton.errors import ConfigError
from baton.model_source import is_hub_id

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_NO_TEXT = "copy tokenizer.json and tokenizer_config.json from the model's source; without them only token ids work"


def probe_arguments(config: Config) -> list[str]:
    """What node_engine/probe.py is to look at."""
    if not is_folder(config):
        return []
    return [config.model, "config"] if config.load_format == "dummy" else [config.model]


def is_folder(config: Config) -> bool:
    return config.engine == "model" and Path(config.model).is_dir() and bool(config.model)


def model_folder(config: Config, found: Mapping[str, Any]) -> list[Finding]:
    """`found` is what the probe said."""
    if config.engine != "model":
        return [ok("model", f"none: --engine {config.engine}")]
    if not config.model:
        return [bundled_model()]
    if not Path(config.model).exists():
        if is_hub_id(config.model):
            told = f"{config.model} is no folder here: the first start downloads it from the model hub"
            return [warning("model", told, "give --model a folder to need no network")]
        return [bad("model", f"there is no {config.model}", "give --model the path of a Hugging Face folder")]
    wrong = found.get("model", "it could not be looked at: see torch")
    if wrong:
        return [bad("model", str(wrong), "see the message; download the model again if files are damaged")]
    return [ok("model", f"{config.model}: configuration and weights are sound"), tokenizer(Path(config.model))]


def bundled_model() -> Finding:
    """What `baton up` serves when no model is named. An installed wheel has none."""
    try:
        default_model()
    except ConfigError as error:
        return bad("model", error.message, "give --model the path of a Hugging Face folder, or a hub id")
    return ok("model", "none named: `baton up` serves its own small one")


def tokenizer(folder: Path) -> Finding:
    there = [name for name in _TOKENIZERS if (folder / name).is_file()]
    if not there:
        return warning("tokenizer", f"{folder} has none of {', '.join(_TOKENIZERS)}", _NO_TEXT)
    return ok("tokenizer", ", ".join(there))
