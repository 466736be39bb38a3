"""A self-test whose writer cannot start fails with a reason. No GPU is used here."""

import sys
from pathlib import Path
from typing import cast

import pytest

from kv_transfer.device import fence_self_test
from kv_transfer.device.cuda_driver_api import CudaWorkDriver
from kv_transfer.device.fence_self_test import FenceFailed, SlowWriter


class NoDriver:
    """Stands in for a CudaWorkDriver that gives out memory."""

    def allocate(self, size: int) -> int:
        return 4096

    def clear(self, address: int, size: int) -> None: ...


def start_writer(folder: Path) -> SlowWriter:
    return SlowWriter(cast(CudaWorkDriver, NoDriver()), folder, "running")


def make_program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exec sleep 600", r"gave no answer for 0\.05 s"),
        ("echo no such device >&2; exit 1", "failed: no such device"),
    ],
)
def test_a_writer_that_does_not_start(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", make_program(tmp_path / "python", script))
    if "sleep" in script:
        monkeypatch.setattr(fence_self_test, "_ANSWER_SECONDS", 0.05)
    with pytest.raises(FenceFailed, match=reason), start_writer(tmp_path) as writer:
        writer.wait_until_ready()
    assert writer.process.returncode is not None
