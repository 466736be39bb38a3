"""`python -m node_engine.probe [MODEL_FOLDER]`: libraries, kernels, GPUs and model as JSON.

Prints one JSON object on standard output, for `baton doctor`, which does not load torch itself.
"""

import ctypes
import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from baton.errors import ConfigError


def probe_libraries() -> dict[str, Any]:
    """Versions of libraries, or why they cannot be loaded; the GPUs that torch sees; the driver."""
    found: dict[str, Any] = {
        "gpus": [],
        "driver": probe_driver(),
        "native_kernels": probe_native_kernels(),
    }
    for name in ("torch", "triton"):
        try:
            found[name] = {"version": importlib.import_module(name).__version__}
        except Exception as error:  # a broken binary raises anything
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
    if "version" in found["torch"]:
        import torch

        found["torch"]["cuda"] = torch.version.cuda
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found["gpus"] = [probe_gpu(index) for index in range(count)]
    return found


def probe_native_kernels() -> dict[str, str]:
    """The native CPU kernels as `describe_features` says, or why there are none, and the fix."""
    from kv_kernels.native.native_library import NativeLibrary, describe_features, load_library

    library = load_library()
    if isinstance(library, NativeLibrary):
        return {"features": describe_features(library.features)}
    return {"reason": library.reason, "fix": library.fix}


def probe_gpu(index: int) -> dict[str, Any]:
    """Name, compute capability and memory of a GPU, or why it does not answer."""
    import torch

    gpu: dict[str, Any] = {
        "name": torch.cuda.get_device_name(index),
        "capability": list(torch.cuda.get_device_capability(index)),
    }
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return gpu | {"error": str(error).partition("\n")[0][:500]}
    return gpu | {"free_bytes": free, "total_bytes": total}


def probe_driver(root: Path = Path("/")) -> dict[str, Any] | None:
    """What there is of an NVIDIA driver; None if there is nothing of it.

    In a container without GPUs the driver's version can be read, but its device files and its
    library are not there. `root` is the root folder.
    """
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    version = re.search(r"\b\d{3,}\.\d+(\.\d+)*", text)
    files = [*root.glob("dev/nvidia[0-9]*"), *root.glob("dev/dxg")]  # dxg: Windows Subsystem
    cuda_version = read_supported_cuda_version()
    if not (version or files or cuda_version):
        return None
    return {
        "version": version[0] if version else None,
        "has_device_files": bool(files),
        "cuda_version": cuda_version,
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def read_supported_cuda_version() -> str | None:
    """The newest CUDA version that the driver's library supports; None without that library."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def check_model_folder(folder: str, *, weights: bool) -> str:
    """The error in a model folder, or "" if there is none. `weights`: open the weights as well."""
    from node_engine.model.config.model_config import load_model_config
    from node_engine.model.loading.checkpoint import Checkpoint

    try:
        load_model_config(Path(folder))
        if weights:
            with closing(Checkpoint(Path(folder))) as checkpoint:
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
