import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cli.common.errors import CommandFailed
from baton.cli.supervisor.state_folder import PidFile, state_folder, stop_cluster
from baton.config.settings import Config
from baton.errors import ConfigError

HOLDER = """
import signal, sys
from pathlib import Path
from baton.cli.supervisor.state_folder import PidFile
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
PidFile(Path(sys.argv[1])).write_pid()
print("held", flush=True)
signal.pause()
"""
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def holder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    hearing = getattr(request, "param", "hears")
    command = [sys.executable, "-c", HOLDER, str(tmp_path), hearing]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_stop_cluster_of_a_folder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    assert stop_cluster(tmp_path, 10.0) is True
    assert holder.wait() == -signal.SIGTERM
    with pytest.raises(CommandFailed, match="no cluster runs"):
        stop_cluster(tmp_path, 10.0)


@pytest.mark.parametrize("holder", ["deaf"], indirect=True)
def test_cluster_that_ignores_sigterm_is_killed(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    assert stop_cluster(tmp_path, 0.05) is False
    assert holder.wait() == -signal.SIGKILL


def test_two_clusters_cannot_share_a_folder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(ConfigError, match=rf"pid {holder.pid}\)"):
        PidFile(tmp_path)
    holder.kill()
    holder.wait()
    PidFile(tmp_path).release()


def test_stale_pid_file_signals_nobody(tmp_path: Path) -> None:
    (tmp_path / "up.pid").write_text(f"{os.getpid()}\n")  # nobody holds the lock
    with pytest.raises(CommandFailed, match="no cluster runs"):
        stop_cluster(tmp_path, 1.0)


def test_stop_where_no_cluster_ever_ran(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="no cluster runs"):
        stop_cluster(tmp_path / "none", 1.0)


def test_state_folder_of_each_port(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert state_folder(Config(port=8123), home) == tmp_path / ".baton" / "8123"
    assert state_folder(Config(port=8123), home | {"XDG_RUNTIME_DIR": "/run/user/1"}) == Path(
        "/run/user/1/baton/8123"
    )
    assert state_folder(Config(port=8123), {"HOME": "/nonexistent"}).name == "8123"
    assert state_folder(Config(port=8123, state_dir="/x"), home) == Path("/x")
