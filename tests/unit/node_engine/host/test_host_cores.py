"""The page by which processes share cores: one slot each, and a file that goes with the last."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.process.cores import count_usable_cores
from baton.shared_memory.segment import list_stale_segments, remove_stale_segments
from node_engine.host import host_cores
from node_engine.host.host_cores import HostCores, open_host_cores

ONE_NODE = """
import sys
from pathlib import Path
from node_engine.host.host_cores import open_host_cores
cores = open_host_cores(Path(sys.argv[1]))
found = cores.page[64 * 61]
cores.page[64 * 61] = 7
print(cores.slot, found, flush=True)
sys.stdin.read()
"""

FORKING = """
import os, sys
from pathlib import Path
from node_engine.host.host_cores import open_host_cores
folder = Path(sys.argv[1])
cores = open_host_cores(folder)
for child in range(2):
    if os.fork() == 0:
        if child:
            print("slot", open_host_cores(folder).slot, flush=True)
        sys.exit(0)
    os.wait()
    print(len(os.listdir(folder)), flush=True)
"""


def start_node(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ONE_NODE, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_line(node: subprocess.Popen[str]) -> str:
    assert node.stdout is not None
    return node.stdout.readline().strip()


def test_processes_have_slots_of_one_page_and_the_last_one_removes_it(tmp_path: Path) -> None:
    with start_node(tmp_path) as first:
        assert read_line(first) == "0 0"
        with start_node(tmp_path) as second:
            assert read_line(second) == "1 7"
            assert list_stale_segments(tmp_path) == []
            second.communicate("")
        assert len(list(tmp_path.iterdir())) == 1
        first.communicate("")
    assert not list(tmp_path.iterdir())


def test_forked_process_leaves_the_page_and_the_slot_of_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKING, str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == ["1", "slot 1", "1"]
    assert not list(tmp_path.iterdir())


def test_slot_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with start_node(tmp_path) as killed:
        assert read_line(killed) == "0 0"
        killed.kill()
    assert len(list_stale_segments(tmp_path)) == 1
    with start_node(tmp_path) as node:
        assert read_line(node) == "0 7"
        node.communicate("")
    with start_node(tmp_path) as killed:
        read_line(killed)
        killed.kill()
    assert len(remove_stale_segments(tmp_path)) == 1
    assert not list(tmp_path.iterdir())


def test_process_has_one_slot_while_it_uses_it(tmp_path: Path) -> None:
    found = open_host_cores(tmp_path)
    assert isinstance(found, HostCores)
    assert found is open_host_cores(tmp_path)
    assert found.cores == count_usable_cores()
    assert found.address % os.sysconf("SC_PAGESIZE") == 0
    del found
    assert not list(tmp_path.iterdir())


def test_folder_that_cannot_be_used_is_logged(tmp_path: Path) -> None:
    with capture_logs() as lines:
        assert open_host_cores(tmp_path / "missing") is None
    (line,) = lines
    assert line["log_level"] == "warning"
    assert "missing" in line["reason"]


def test_full_folder_is_logged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def allocate(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with capture_logs() as lines:
        assert open_host_cores(tmp_path) is None
    assert "no space" in lines[0]["reason"]
    assert not list(tmp_path.iterdir())


def test_processes_on_other_cores_have_another_page(monkeypatch: pytest.MonkeyPatch) -> None:
    here = host_cores.compute_cores_id()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {100, 101})
    assert host_cores.compute_cores_id() != here


def test_containers_with_quotas_have_pages_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without = host_cores.compute_cores_id()
    monkeypatch.setattr(host_cores, "has_core_quota", lambda: True)
    ids = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(host_cores, "_CGROUP_FOLDER", tmp_path / name)
        ids.add(host_cores.compute_cores_id())
    assert len(ids - {without}) == 2
