"""`python -m node_engine.probe [MODEL_FOLDER]`: libraries, GPUs and model of this machine as JSON.

Prints one JSON object on standard output, for `baton doctor`, which does not load torch itself.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.errors import ConfigError


def probe_libraries() -> dict[str, Any]:
    """Versions of libraries, or why they cannot be loaded; the GPUs that torch sees.

    `fp8_gpus` counts those that multiply in FP8.
    """
    found: dict[str, Any] = {"gpus": [], "fp8_gpus": 0}
    for name in ("torch", "triton"):
        try:
            found[name] = {"version": importlib.import_module(name).__version__}
        except Exception as error:  # a broken binary raises anything
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
    if "version" in found["torch"]:
        import torch

        from node_engine.model.loading.fp8_support import MIN_COMPUTE_CAPABILITY

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found["gpus"] = [torch.cuda.get_device_name(index) for index in range(count)]
        found["fp8_gpus"] = sum(
            torch.cuda.get_device_capability(index) >= MIN_COMPUTE_CAPABILITY
            for index in range(count)
        )
    return found


def check_model_folder(folder: str, *, weights: bool) -> str:
    """The error in a model folder, or "" if there is none. `weights`: open the weights as well."""
    from node_engine.model.config.model_config import load_model_config
    from node_engine.model.loading.checkpoint import Checkpoint

    try:
        load_model_config(Path(folder))
        if weights:
            with Checkpoint(Path(folder)) as checkpoint:
                return (
                    ""
                    if checkpoint.tensor_names
                    else f"{folder}: the weights hold no tensor: download them again"
                )
    except ConfigError as error:
        return error.message
    return ""


def main(arguments: Sequence[str]) -> int:
    """`arguments`: none, or a model folder, then optionally `config` to skip its weights."""
    found = probe_libraries()
    if arguments and "version" in found["torch"]:
        found["model"] = check_model_folder(arguments[0], weights="config" not in arguments[1:])
    print(json.dumps(found))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
