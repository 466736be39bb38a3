"""The check of `baton doctor` about the kernels of nodes on CPUs."""

from typing import Any

import pytest

from baton.cli.checks.cpu_kernels import check_cpu_kernels
from baton.config.settings import Config
from tests.unit.cli.findings import assert_finding

BUILT = {"native_kernels": {"features": "AVX512, VNNI, BF16"}}
NOT_BUILT = {"native_kernels": {"reason": "it is not built", "fix": "build it"}}
OTHER_CPU = {"native_kernels": {"reason": "no AVX2", "fix": ""}}
GPU = {"gpus": [{"name": "NVIDIA H200"}]}


@pytest.mark.parametrize(
    ("settings", "found", "level", "words"),
    [
        ({}, BUILT, "ok", ["native (AVX512, VNNI, BF16)"]),
        ({"cpu_kernels": "native"}, BUILT, "ok", ["native"]),
        (
            {"quantize": "int8", "kv_dtype": "int8"},
            BUILT,
            "ok",
            ["BF16), products in int8, KV cache in int8"],
        ),
        ({"cpu_kernels": "torch"}, BUILT, "ok", ["torch (--cpu-kernels torch)"]),
        ({}, NOT_BUILT, "warning", ["it is not built", "build it", "--cpu-kernels torch"]),
        ({"cpu_kernels": "torch"}, NOT_BUILT, "ok", []),
        ({"cpu_kernels": "native"}, NOT_BUILT, "bad", ["build it", "--cpu-kernels auto"]),
        ({}, OTHER_CPU, "ok", ["torch: no AVX2"]),
        ({"cpu_kernels": "native"}, OTHER_CPU, "bad", ["no AVX2", "--cpu-kernels auto"]),
        ({}, NOT_BUILT | GPU, "ok", ["GPUs need none"]),
        ({"device": "cpu"}, NOT_BUILT | GPU, "warning", ["it is not built"]),
        ({"engine": "paced"}, NOT_BUILT, "ok", ["--engine paced"]),
        ({}, {"error": "it died"}, "ok", ["see torch"]),
    ],
)
def test_cpu_kernels(
    settings: dict[str, Any], found: dict[str, Any], level: str, words: list[str]
) -> None:
    assert_finding(check_cpu_kernels(Config(**settings), found), level, *words)
