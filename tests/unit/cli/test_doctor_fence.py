"""`baton doctor` says whether KV can travel from GPU to GPU."""

import subprocess
import sys

import pytest

from baton.cli.checks import device_fence
from baton.config.settings import Config

GPUS = [{"name": "H200"}]


@pytest.mark.parametrize(
    ("config", "gpus"),
    [
        (Config(model="x"), []),
        (Config(model="x", device="cpu"), GPUS),
        (Config(engine="paced"), GPUS),
        (Config(model="x", transport="shm"), GPUS),
    ],
    ids=["no GPU", "on CPUs", "no model", "another transport"],
)
def test_nothing_is_tried_without_a_use_for_it(
    config: Config, gpus: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_fence, "run_fence_probe", lambda folder: 1 / 0)
    assert device_fence.check_device_fence(config, gpus) == []


@pytest.mark.parametrize(
    ("found", "level", "said"),
    [
        ({"refusals": {"0": "", "1": ""}}, "ok", "proven on 2 GPU"),
        ({"refusals": {"0": "", "1": "an MPS server listens"}}, "warning", "an MPS server listens"),
        ({"error": "ended with 1: no module"}, "warning", "no module"),
    ],
    ids=["proven", "refused", "failed"],
)
def test_the_finding_names_the_reason(
    found: dict[str, object], level: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_fence, "run_fence_probe", lambda folder: found)
    [finding] = device_fence.check_device_fence(Config(model="x"), GPUS)
    assert finding.level == level
    assert said in finding.detail
    assert bool(finding.fix) == (level != "ok")


@pytest.mark.slow
def test_the_probe_says_why_there_is_no_proof_without_a_gpu(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = device_fence.run_fence_probe(str(tmp_path))
    assert "error" in found or list(found["refusals"]) == ["0"]
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "ended with 1" in device_fence.run_fence_probe(str(tmp_path))["error"]

    def too_slow(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("probe", 30)

    monkeypatch.setattr(subprocess, "run", too_slow)
    assert "TimeoutExpired" in device_fence.run_fence_probe(str(tmp_path))["error"]
