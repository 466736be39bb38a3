"""The checks of `baton doctor` about GPUs: the driver, the build of torch, memory, Triton."""

from typing import Any, Literal

import pytest

from baton.cli.checks import gpu
from baton.cli.checks.finding import Finding
from baton.config.settings import Config
from tests.unit.cli.findings import PROBE_RESULT, assert_finding

GIB = 1 << 30
DRIVER: dict[str, Any] = {
    "version": "570.86.15",
    "has_device_files": True,
    "cuda_version": "12.8",
    "visible_devices": None,
}
H200: dict[str, Any] = {
    "name": "NVIDIA H200",
    "capability": [9, 0],
    "free_bytes": 140 * GIB,
    "total_bytes": 141 * GIB,
}


def test_choice_of_gpus() -> None:
    found = {**PROBE_RESULT, "gpus": [H200, H200]}
    for gpus, level, words in (
        ("all", "ok", "GPU 0: prefill-0; GPU 1: decode-0 (--gpus)"),
        ("1", "ok", "GPU 0: prefill-0, decode-0 in time slices"),
        ("9", "bad", "gpus is '9': 2 GPUs are visible here"),
    ):
        findings = {each.name: each for each in gpu.check_gpus(Config(gpus=gpus), found)}
        assert_finding(findings["gpus"], level, words)
    findings = {each.name: each for each in gpu.check_gpus(Config(gpus="1"), PROBE_RESULT)}
    assert_finding(findings["gpus"], "bad", "no NVIDIA GPU is visible here")
    assert "gpus" not in {each.name for each in gpu.check_gpus(Config(), PROBE_RESULT)}


def test_device() -> None:
    assert_finding(gpu.check_device(PROBE_RESULT, "cuda"), "bad", "nvidia-smi")
    assert_finding(gpu.check_device(PROBE_RESULT, "auto"), "ok", "CPU")
    assert_finding(gpu.check_device({"gpus": [H200, H200]}, "cuda"), "ok", "2 GPU: NVIDIA H200")
    assert_finding(gpu.check_device({"gpus": [H200]}, "cpu"), "ok", "--device cpu")
    assert_finding(gpu.check_device({"gpus": [H200]}, "cuda", "paced"), "ok", "--engine paced")


@pytest.mark.parametrize(("requested", "level"), [("auto", "warning"), ("cuda", "bad")])
@pytest.mark.parametrize(
    ("torch", "changes", "words"),
    [
        (
            {"version": "2.13.0+cpu", "cuda": None},
            {},
            ("torch 2.13.0+cpu is built without CUDA", "pip install", "CUDA 12.8 or older"),
        ),
        (
            {"version": "2.13.0", "cuda": "13.0"},
            {},
            ("for CUDA 13.0", "supports CUDA 12.8", "update the driver"),
        ),
        (
            {"version": "2.13.0", "cuda": "12.8"},
            {"visible_devices": ""},
            ("CUDA_VISIBLE_DEVICES='' hides", "unset CUDA_VISIBLE_DEVICES"),
        ),
    ],
)
def test_cpu_by_accident(
    requested: str, level: str, torch: Any, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    """The machine has a GPU and its driver, and torch sees nothing of it."""
    found = {**PROBE_RESULT, "torch": torch, "driver": DRIVER | changes}
    assert_finding(gpu.check_device(found, requested), level, "--device cpu", *words)
    assert_finding(gpu.check_device(found, "cpu"), "ok")


def test_driver() -> None:
    assert_finding(gpu.check_driver(PROBE_RESULT, may_use_gpus=True), "ok", "no NVIDIA driver")
    assert_finding(gpu.check_driver({"error": "it died"}, may_use_gpus=True), "ok", "see torch")
    found = {"driver": DRIVER}
    assert_finding(
        gpu.check_driver(found, may_use_gpus=True), "ok", "NVIDIA 570.86.15", "up to 12.8"
    )
    outside = {"driver": DRIVER | {"has_device_files": False, "cuda_version": None}}
    words = "no device file /dev/nvidia0 and no library libcuda.so.1", "--gpus all"
    assert_finding(gpu.check_driver(outside, may_use_gpus=True), "warning", *words)
    assert_finding(gpu.check_driver(outside, may_use_gpus=False), "ok", words[0])
    assert_finding(gpu.check_device({**PROBE_RESULT, **outside}, "auto"), "ok")


def test_gpus() -> None:
    found = {**PROBE_RESULT, "driver": DRIVER, "gpus": [H200]}
    findings = {each.name: each for each in gpu.check_gpus(Config(), found)}
    assert all(each.level == "ok" for each in findings.values())
    assert findings["compute capability"].detail == "9.0"
    assert findings["gpu memory"].detail == "140.0GiB of 141.0GiB free"
    for config in (Config(device="cpu"), Config(engine="paced")):
        assert "gpu memory" not in {each.name for each in gpu.check_gpus(config, found)}


def test_gpus_of_little_use() -> None:
    old = H200 | {"name": "Tesla V100", "capability": [7, 0]}
    assert_finding(gpu.check_capability([H200, old]), "warning", "9.0, 7.0", "Tesla V100", "8.0")
    full = H200 | {"free_bytes": 3 * GIB}
    assert_finding(gpu.check_free_memory([H200, full]), "warning", "3.0GiB", "nvidia-smi")
    lost = {"name": "NVIDIA H200", "capability": [9, 0], "error": "CUDA error: no device"}
    assert_finding(gpu.check_free_memory([H200, lost]), "bad", "cuda:1 CUDA error: no device")


def test_fp8() -> None:
    found = {**PROBE_RESULT, "driver": DRIVER, "gpus": [H200]}

    def check(quantize: Literal["none", "fp8"], **settings: Any) -> list[Finding]:
        findings = gpu.check_gpus(Config(quantize=quantize, **settings), found)
        return [finding for finding in findings if finding.name == "fp8"]

    assert check("none") == check("fp8", engine="paced") == []
    assert_finding(check("fp8")[0], "ok", "1 GPU")
    assert_finding(check("fp8", device="cpu")[0], "bad", "compute on the CPU", "--quantize none")
    old = H200 | {"name": "NVIDIA A100", "capability": [8, 0]}
    assert_finding(gpu.check_fp8([H200, old]), "bad", "NVIDIA A100 has no products in FP8", "8.9")


def test_int8() -> None:
    found = {**PROBE_RESULT, "driver": DRIVER, "gpus": [H200]}

    def check(**settings: Any) -> list[Finding]:
        findings = gpu.check_gpus(Config(quantize="int8", **settings), found)
        return [finding for finding in findings if finding.name == "int8"]

    assert check(engine="paced") == []
    assert_finding(check(device="cpu")[0], "ok", "on the CPU")
    words = "--quantize int8 is for CPUs", "NVIDIA H200", "--device cpu", "--quantize fp8"
    assert_finding(check()[0], "bad", *words)
    [_, of_kv] = check(kv_dtype="int8")
    assert_finding(of_kv, "bad", "--kv-dtype int8 is for CPUs", "NVIDIA H200", "--kv-dtype auto")


def test_speculation() -> None:
    found = {**PROBE_RESULT, "driver": DRIVER, "gpus": [H200]}

    def check(**settings: Any) -> list[Finding]:
        findings = gpu.check_gpus(Config(**settings), found)
        return [finding for finding in findings if finding.name == "speculative decoding"]

    assert check() == check(speculative="ngram", engine="paced") == []
    assert_finding(check(speculative="ngram", device="cpu")[0], "ok", "on the CPU")
    words = "--speculative ngram is for CPUs", "NVIDIA H200", "--speculative none"
    assert_finding(check(speculative="ngram")[0], "bad", *words)


def test_triton() -> None:
    broken = {"triton": {"error": "ImportError"}}
    assert_finding(
        gpu.check_triton({**broken, "gpus": [H200]}),
        "bad",
        "ImportError",
        "CUDA build of torch",
    )
    assert_finding(gpu.check_triton(broken), "ok", "a CPU needs none")
