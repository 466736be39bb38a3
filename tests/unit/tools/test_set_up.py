"""What set-up installs: torch without CUDA where its index can be reached, and nothing of tests for
the demo."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import demo, footprint, install_torch

ROOT = Path(__file__).resolve().parents[3]
PYTORCH_CPU = "https://download.pytorch.org/whl/cpu"


def commands(target: str, *arguments: str) -> str:
    """What make would run for a checkout without .venv."""
    if shutil.which("make") is None:
        pytest.skip("make is not here")
    make = ["make", "-n", target, "VENV=no-such-folder", f"PYTHON={sys.executable}", *arguments]
    return subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_demo_installs_what_runs_and_nothing_for_tests() -> None:
    done = commands("demo", f"TORCH_INDEX={PYTORCH_CPU}")
    assert f'tools/install_torch.py "{PYTORCH_CPU}"' in done
    assert "[test]" not in done
    assert "--quiet" not in done, "an installation of minutes shows how far it is"
    assert '".[test]"' in commands("lint")


def test_a_machine_with_a_gpu_gets_torch_from_where_pip_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert 'tools/install_torch.py ""' in commands("setup")


def test_the_index_is_that_of_the_image() -> None:
    assert f"ARG TORCH_INDEX={PYTORCH_CPU}\n" in (ROOT / "deploy" / "Dockerfile").read_text()
    assert PYTORCH_CPU in (ROOT / "Makefile").read_text()


def test_unreachable_index_is_tried_once_and_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install_torch, "is_installed", lambda: False)
    monkeypatch.setattr(
        install_torch,
        "install_from_index",
        lambda index: pytest.fail("there is nothing to install from"),
    )
    install_torch.main("http://127.0.0.1:1/whl/cpu")
    assert "cannot be reached" in capsys.readouterr().out
    install_torch.main("")
    assert capsys.readouterr().out == ""


def test_installed_torch_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        install_torch, "find_index_problem", lambda index: pytest.fail("nobody is to be asked")
    )
    install_torch.main(PYTORCH_CPU)


def test_installed_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100_000))
    (tmp_path / "link").symlink_to("/proc/kcore")
    assert 100_000 <= footprint.disk_bytes(tmp_path) <= 200_000


def test_cluster_memory_reads_proc_status(tmp_path: Path) -> None:
    """Its maps and smaps are root's to read; its status is everybody's."""
    process, segment = tmp_path / "42", tmp_path / "baton-pool-1"
    process.mkdir()
    (process / "status").write_text(
        "Name:\tpython\nVmRSS:\t  900 kB\nRssAnon:\t     300 kB\nRssFile:\t  600 kB\n"
    )
    for name in ("maps", "smaps_rollup"):
        (process / name).symlink_to(process / "nothing")  # an OSError for root, too
    segment.write_bytes(bytes(1 << 20))
    segments = footprint.list_segment_files(tmp_path, "baton-")
    assert footprint.measure_cluster_memory([42], segments, tmp_path) == (
        300 << 10,
        segment.stat().st_blocks * 512,
    )


@pytest.mark.slow
def test_demo_continues_when_memory_is_unreadable(tmp_path: Path) -> None:
    assert demo.describe_footprint([1 << 30], ()).startswith("memory: not readable (")
    assert demo.describe_footprint([], [tmp_path / "gone"]).startswith("memory: not readable (")
