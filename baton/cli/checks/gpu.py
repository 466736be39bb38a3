"""Checks of the GPUs: their driver, the build of torch, Triton, and whether nodes can use them."""

from collections.abc import Mapping, Sequence
from typing import Any

from baton.cli.checks.finding import Finding, bad_finding, ok_finding, warning_finding
from baton.cli.supervisor.gpus import choose_gpus
from baton.config.settings import ALL_GPUS, Config
from baton.errors import ConfigError
from baton.kv.blocks import INT8_KV
from baton.models.model_identity import FP8, FP8_MIN_CAPABILITY, INT8
from baton.shared_memory.available_memory import format_size

MIN_CAPABILITY = (8, 0)  # of products in bfloat16
MIN_FREE_SHARE = 0.5  # of a GPU's memory
_MAX_GPUS_SHOWN = 8
_NO_DEVICES = ("", "-1")  # values of CUDA_VISIBLE_DEVICES
_PACKAGE_INDEX = "https://download.pytorch.org/whl"


def check_gpus(config: Config, found: Mapping[str, Any]) -> list[Finding]:
    """Check driver, torch and GPUs of this machine.

    `found` is what a short process with the imports of a node saw of them (`run_node_probe`).
    """
    may_use_gpus = config.engine == "model" and config.device != "cpu"
    gpus = found.get("gpus", []) if may_use_gpus else []
    return [
        check_driver(found, may_use_gpus=may_use_gpus),
        check_device(found, config.device, config.engine),
        *([check_capability(gpus), check_free_memory(gpus)] if gpus else []),
        *(check_device_settings(config, gpus) if config.engine == "model" else []),
        check_triton(found),
    ]


def check_driver(found: Mapping[str, Any], *, may_use_gpus: bool) -> Finding:
    """Check that the machine's NVIDIA driver, if it has one, can be used by this process."""
    if "driver" not in found:
        return ok_finding("gpu driver", "not looked for: see torch")
    driver = found["driver"]
    if driver is None:
        return ok_finding("gpu driver", "no NVIDIA driver on this machine")
    name = f"NVIDIA {driver['version'] or 'driver'}"
    missing = _list_missing_parts(driver)
    if not missing:
        return ok_finding("gpu driver", f"{name}, for CUDA up to {driver['cuda_version']}")
    detail = f"the machine has {name}, and this process has no {' and no '.join(missing)}"
    if not may_use_gpus:
        return ok_finding("gpu driver", detail)
    return warning_finding(
        "gpu driver",
        detail,
        "give the container GPUs (docker run --gpus all, docker compose --profile gpu),"
        " or set --device cpu",
    )


def check_device(found: Mapping[str, Any], requested: str, engine: str = "model") -> Finding:
    """Check that nodes compute on a GPU if there is one, and that what --device names is there."""
    gpus = found.get("gpus", [])
    if engine != "model":
        return ok_finding("device", f"--engine {engine} computes on the CPU")
    if requested == "cpu":
        return ok_finding("device", "--device cpu: models run on the CPU")
    if gpus:
        names = ", ".join(gpu["name"] for gpu in gpus[:_MAX_GPUS_SHOWN])
        return ok_finding("device", f"{len(gpus)} GPU: {names}")
    driver = found.get("driver")
    if driver and not _list_missing_parts(driver) and "version" in found.get("torch", {}):
        cause, fix = explain_unseen_gpus(found["torch"], driver)
        if requested == "cuda":
            return bad_finding("device", f"--device cuda, and {cause}", fix)
        return warning_finding("device", f"models run on the CPU, because {cause}", fix)
    if requested == "cuda":
        return bad_finding(
            "device",
            "--device cuda, and torch sees no GPU",
            "check nvidia-smi, install torch with CUDA, or use --device cpu",
        )
    return ok_finding("device", "no GPU: models run on the CPU")


def explain_unseen_gpus(torch: Mapping[str, Any], driver: Mapping[str, Any]) -> tuple[str, str]:
    """Why torch sees no GPU of a machine that has an NVIDIA driver, and the fix."""
    build, supported = torch["version"], driver["cuda_version"]
    if torch["cuda"] is None:
        return (
            f"torch {build} is built without CUDA",
            f"pip install --force-reinstall torch --index-url {_PACKAGE_INDEX}/cu130 (or another"
            f" build for CUDA {supported} or older), or set --device cpu",
        )
    if driver["visible_devices"] in _NO_DEVICES:
        return (
            f"CUDA_VISIBLE_DEVICES={driver['visible_devices']!r} hides the GPUs",
            "unset CUDA_VISIBLE_DEVICES, or set --device cpu",
        )
    return (
        f"torch {build} for CUDA {torch['cuda']} sees no GPU; the driver supports CUDA {supported}",
        "check nvidia-smi, update the driver or install a build of torch for its CUDA version,"
        " or set --device cpu",
    )


def _list_missing_parts(driver: Mapping[str, Any]) -> list[str]:
    parts = {
        "device file /dev/nvidia0": driver["has_device_files"],
        "library libcuda.so.1": driver["cuda_version"],
    }
    return [name for name, is_there in parts.items() if not is_there]


def check_capability(gpus: Sequence[Mapping[str, Any]]) -> Finding:
    """Check that the GPUs can multiply in bfloat16."""
    shown = ", ".join(".".join(map(str, gpu["capability"])) for gpu in gpus[:_MAX_GPUS_SHOWN])
    older = [gpu["name"] for gpu in gpus if tuple(gpu["capability"]) < MIN_CAPABILITY]
    if not older:
        return ok_finding("compute capability", shown)
    return warning_finding(
        "compute capability",
        f"{shown}: {older[0]} has no products in bfloat16, which need 8.0",
        "choose newer GPUs with CUDA_VISIBLE_DEVICES, or set --device cpu",
    )


def check_device_settings(config: Config, gpus: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Check that nodes on these GPUs, or on the CPU if there are none, can serve these settings."""
    findings = [check_gpu_choice(config, len(gpus))] if gpus or config.gpus != ALL_GPUS else []
    if config.quantize == FP8:
        findings.append(check_fp8(gpus))
    if config.quantize == INT8:
        fix = "set --device cpu, --quantize fp8 on GPUs that have FP8, or --quantize none"
        findings.append(check_int8("--quantize", gpus, fix))
    if config.kv_dtype == INT8_KV:
        findings.append(check_int8("--kv-dtype", gpus, "set --device cpu or --kv-dtype auto"))
    if config.speculative != "none":
        findings.append(check_speculation(config.speculative, gpus))
    return findings


def check_gpu_choice(config: Config, num_visible: int) -> Finding:
    """Check that the GPUs of --gpus are there, and say which node computes where."""
    try:
        _, notices = choose_gpus(config, num_visible)
    except ConfigError as error:
        return bad_finding("gpus", error.message, "choose GPUs that are there with --gpus")
    return ok_finding("gpus", notices[0])


def check_speculation(method: str, gpus: Sequence[Mapping[str, Any]]) -> Finding:
    """Check that no node computes on a GPU, where there is no speculative decoding."""
    if not gpus:
        return ok_finding("speculative decoding", f"--speculative {method}, on the CPU")
    cause = f"--speculative {method} is for CPUs, and nodes compute on {gpus[0]['name']}"
    return bad_finding("speculative decoding", cause, "set --device cpu or --speculative none")


def check_int8(option: str, gpus: Sequence[Mapping[str, Any]], fix: str) -> Finding:
    """Check that no node computes on a GPU: `option` (a setting) is int8, which only CPUs serve."""
    if not gpus:
        return ok_finding("int8", f"{option} int8, on the CPU")
    cause = f"{option} int8 is for CPUs, and nodes compute on {gpus[0]['name']}"
    return bad_finding("int8", cause, fix)


def check_fp8(gpus: Sequence[Mapping[str, Any]]) -> Finding:
    """Check that there are GPUs to use, and that all of them can multiply in FP8."""
    needed = ".".join(map(str, FP8_MIN_CAPABILITY))
    older = [gpu["name"] for gpu in gpus if tuple(gpu["capability"]) < FP8_MIN_CAPABILITY]
    if gpus and not older:
        return ok_finding("fp8", f"on {len(gpus)} GPU")
    cause = f"{older[0]} has no products in FP8" if older else "nodes compute on the CPU"
    return bad_finding(
        "fp8",
        f"--quantize fp8, and {cause}",
        f"choose GPUs of compute capability {needed} or later, or set --quantize none",
    )


def check_free_memory(gpus: Sequence[Mapping[str, Any]]) -> Finding:
    """Check that no other process uses most of a GPU's memory."""
    failed = [f"cuda:{index} {gpu['error']}" for index, gpu in enumerate(gpus) if "error" in gpu]
    if failed:
        return bad_finding(
            "gpu memory",
            f"does not answer: {failed[0]}",
            "check nvidia-smi and the kernel's log; restart the machine if a GPU is lost",
        )
    shown = ", ".join(
        f"{format_size(gpu['free_bytes'])} of {format_size(gpu['total_bytes'])}"
        for gpu in gpus[:_MAX_GPUS_SHOWN]
    )
    if all(gpu["free_bytes"] >= MIN_FREE_SHARE * gpu["total_bytes"] for gpu in gpus):
        return ok_finding("gpu memory", f"{shown} free")
    return warning_finding(
        "gpu memory",
        f"{shown} free: other processes use the rest, perhaps nodes that run already",
        "end the processes that nvidia-smi lists, or choose a GPU with CUDA_VISIBLE_DEVICES",
    )


def check_triton(found: Mapping[str, Any]) -> Finding:
    """Check that Triton can be loaded if there are GPUs. A CPU does not need it."""
    triton = found.get("triton", {"error": "not looked for"})
    if "version" in triton:
        return ok_finding("triton", triton["version"])
    if found.get("gpus"):
        detail = f"there are GPUs, and it cannot be loaded: {triton['error']}"
        return bad_finding(
            "triton",
            detail,
            "install a CUDA build of torch, which brings it: pip install --force-reinstall torch",
        )
    return ok_finding("triton", "not there; a CPU needs none")
