"""Checks which kernels nodes on CPUs compute with."""

from collections.abc import Mapping
from typing import Any

from baton.cli.checks.finding import Finding, bad_finding, ok_finding, warning_finding
from baton.config.settings import Config
from baton.kv.blocks import INT8_KV
from baton.models.model_identity import INT8

_NAME = "cpu kernels"


def check_cpu_kernels(config: Config, found: Mapping[str, Any]) -> Finding:
    """Check that the native kernels are there, unless nothing here would use them.

    `found` is what a short process with the imports of a node saw (`run_node_probe`).
    """
    native = found.get("native_kernels")
    if native is None:
        return ok_finding(_NAME, "not looked for: see torch")
    if config.engine != "model":
        return ok_finding(_NAME, f"--engine {config.engine} needs none")
    if config.cpu_kernels == "torch":
        return ok_finding(_NAME, "torch (--cpu-kernels torch)")
    if "features" in native:
        return ok_finding(_NAME, f"native ({native['features']}){_describe_formats(config)}")
    reason, fix = native["reason"], native["fix"]
    if config.cpu_kernels == "native":
        ways = [fix, "set --cpu-kernels auto"]
        detail = f"--cpu-kernels native, and {reason}"
        return bad_finding(_NAME, detail, ", or ".join(filter(None, ways)))
    if config.device == "cuda" or (config.device == "auto" and found.get("gpus")):
        return ok_finding(_NAME, f"torch, and nodes on GPUs need none: {reason}")
    if not fix:
        return ok_finding(_NAME, f"torch: {reason}")
    return warning_finding(
        _NAME, f"torch, which is slower: {reason}", f"{fix}, or set --cpu-kernels torch"
    )


def _describe_formats(config: Config) -> str:
    """What the native kernels have in int8. They serve every shape of a supported model."""
    products = ", products in int8" if config.quantize == INT8 else ""
    return products + (", KV cache in int8" if config.kv_dtype == INT8_KV else "")
