"""What tests of `baton doctor` share: a probe's result on a machine without a GPU."""

from typing import Any

from baton.cli.checks.finding import Finding

PROBE_RESULT: dict[str, Any] = {
    "torch": {"version": "2", "cuda": None},
    "triton": {"version": "3"},
    "gpus": [],
    "driver": None,
    "model": "",
}


def assert_finding(finding: Finding, level: str, *words: str) -> None:
    assert finding.level == level, finding
    assert bool(finding.fix) == (level != "ok")
    for word in words:
        assert word in f"{finding.detail} | {finding.fix}"
