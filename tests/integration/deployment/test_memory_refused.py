"""More cache memory than there is, on real processes: refused in one line with figures and the
setting."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool.harness import ROOT

UP_COMMAND = (
    "baton.cli",
    "up",
    "--engine",
    "paced",
    "--port",
    "0",
    "--grpc-port",
    "0",
    "--admin-port",
    "0",
)


def run_command(folder: Path, *command: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", *command],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            "BATON_SEGMENT_DIR": str(folder),
            "BATON_STATE_DIR": str(folder / "state"),
            "BATON_LOG_LEVEL": "error",
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def check_refused(ended: "subprocess.CompletedProcess[str]", folder: Path, *said: str) -> None:
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith("error: ")
    for part in ("kept in reserve", *said):
        assert part in line
    assert list(folder.glob("baton-*")) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("--kv-memory", "900TiB"), "2 nodes with 921600.0GiB each"),
        (("--pool-memory", "900TiB"), "a smaller --pool-memory"),
    ],
)
def test_up_refuses_too_much_memory_before_it_starts_anything(
    tmp_path: Path, settings: tuple[str, str], said: str
) -> None:
    ended = run_command(tmp_path, *UP_COMMAND, *settings)
    check_refused(ended, tmp_path, said, "--kv-memory", "--shm-size")
    assert not (tmp_path / "state" / "logs").exists()


def test_node_refuses_too_much_memory_before_it_loads_its_model(tmp_path: Path) -> None:
    """There is no such model: it is not looked at."""
    settings = {
        "BATON_COORDINATOR": "127.0.0.1:1",
        "BATON_KV_MEMORY": "900TiB",
        "BATON_MODEL": str(tmp_path),
    }
    check_refused(
        run_command(tmp_path, "decode_node", **settings), tmp_path, "lower --kv-memory to"
    )
