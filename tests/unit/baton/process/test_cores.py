"""How many cores a process may use: its affinity, within the quota of its container."""

import os
from pathlib import Path

import pytest

from baton.process.cores import count_usable_cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("10000 100000\n", 1),
        ("6400000 100000\n", 8),
        ("100000 0\n", 8),
        ("nonsense\n", 8),
        (None, 8),
    ],
)
def test_quota_of_the_container(
    quota: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota)
    assert count_usable_cores(file) == cores
