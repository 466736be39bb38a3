"""Memory that segments may use: the tightest bound counts, less what others have reserved."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.shared_memory import available_memory as rooms
from baton.shared_memory import segment, segment_memory
from baton.shared_memory.available_memory import (
    AvailableMemory,
    measure_available_memory,
    measure_private_memory,
)
from baton.shared_memory.memory_map import HUGE_PAGE

MIB, GIB = 1 << 20, 1 << 30
ROOT = Path(__file__).resolve().parents[4]


class FakeProcFiles:
    """Files of /proc and /sys/fs/cgroup with the memory that the test sets.

    The segment folder is in memory, unless `system` is another file system.
    """

    def __init__(self, folder: Path, segments: Path, system: str = "tmpfs") -> None:
        self.proc, self.groups = folder / "proc", folder / "groups"
        (self.proc / "self").mkdir(parents=True)
        device = segments.stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        line = f"36 35 {number} / /somewhere rw shared:1 - {system} none rw\n"
        (self.proc / "self" / "mountinfo").write_text(line)
        self.write("proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {900 * GIB >> 10} kB\n", folder)
        self.write("proc/self/cgroup", "0::/\n", folder)
        self.folder = folder

    def write(self, name: str, text: str, folder: Path | None = None) -> None:
        path = (folder or self.folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(
        self, name: str, files: tuple[str, str, str], limit: object, used: int, cache: int
    ) -> None:
        self.write(f"groups/{name}/{files[0]}", f"{limit}\n")
        self.write(f"groups/{name}/{files[1]}", f"{used}\n")
        self.write(f"groups/{name}/memory.stat", f"anon 5\n{files[2]} {cache}\n")

    def measure(self, segments: Path) -> AvailableMemory:
        return measure_available_memory(segments, self.proc, self.groups)


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.fixture
def kernel(tmp_path: Path) -> FakeProcFiles:
    return FakeProcFiles(tmp_path / "kernel", tmp_path)


def free(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def test_the_folder_alone(tmp_path: Path, kernel: FakeProcFiles) -> None:
    room = kernel.measure(tmp_path)
    assert room.free_bytes == pytest.approx(free(tmp_path), rel=0.01)
    assert "segment folder" in room.limited_by
    assert room.usable_bytes == room.free_bytes - room.reserve_bytes
    assert room.reserve_bytes == min(GIB, int(0.1 * room.free_bytes))


def test_available_memory(tmp_path: Path, kernel: FakeProcFiles) -> None:
    kernel.write("proc/meminfo", "MemAvailable: 2048 kB\n")
    room = kernel.measure(tmp_path)
    assert (room.free_bytes, room.limited_by) == (2 * MIB, "of the machine's memory available")


@pytest.mark.parametrize(
    ("line", "name", "files"),
    [
        ("0::/a/b", "a/b", V2),
        ("0::/a/b", "a", V2),  # the limit of a group above
        ("0::/../..", "", V2),  # a container that sees its own group as the root
        ("4:memory:/a", "memory/a", V1),
        ("4:cpu,memory:/docker/x", "memory", V1),
        ("0::/a", "unified/a", V2),
    ],
)
def test_control_groups(
    tmp_path: Path, kernel: FakeProcFiles, line: str, name: str, files: tuple[str, str, str]
) -> None:
    kernel.write("proc/self/cgroup", f"9:cpu:/a\n{line}\n")
    kernel.group(name, files, 100 * MIB, used=70 * MIB, cache=20 * MIB)
    room = kernel.measure(tmp_path)
    assert room.free_bytes == 50 * MIB
    assert "control group" in room.limited_by


def test_no_limit_and_no_memory_bound_on_a_disk(tmp_path: Path, kernel: FakeProcFiles) -> None:
    kernel.group("", V2, "max", used=70 * MIB, cache=0)
    assert "segment folder" in kernel.measure(tmp_path).limited_by
    disk = FakeProcFiles(tmp_path / "disk", tmp_path, system="ext4")
    disk.write("proc/meminfo", "MemAvailable: 2048 kB\n")
    assert disk.measure(tmp_path).free_bytes == pytest.approx(free(tmp_path), rel=0.01)
    assert disk.measure(tmp_path).reserve_bytes == 0


def measure_instead(
    monkeypatch: pytest.MonkeyPatch, measure: Callable[[Path], AvailableMemory]
) -> None:
    """Let segments take the available memory from `measure`."""
    for module in (segment, segment_memory):
        monkeypatch.setattr(module, "measure_available_memory", measure)


def test_memory_promised_to_other_segments_is_not_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has reserved a segment and allocated none of it."""
    other = tmp_path / ("baton-arena-" + "0" * 32)
    with other.open("wb") as file:
        file.truncate(40 * MIB)
    measure_instead(monkeypatch, lambda _: AvailableMemory(80 * MIB, "left", reserve_bytes=8 * MIB))
    with pytest.raises(
        ConfigError, match=r"40MiB promised to other segments: lower --kv-memory to 32MiB or less"
    ):
        segment.create_segment(tmp_path, "arena", 38 * MIB)
    assert list(tmp_path.iterdir()) == [other]
    segment.create_segment(tmp_path, "arena", 32 * MIB).close()


def test_filling_stops_when_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs reserve nothing, so the free memory is measured before every piece."""
    lefts = iter([400 * MIB, 400 * MIB, 300 * MIB, 12 * MIB])
    measure_instead(monkeypatch, lambda _: AvailableMemory(next(lefts), "left", reserve_bytes=0))
    with pytest.raises(ConfigError, match="12MiB left"):
        segment.create_segment(tmp_path, "pool", 192 * MIB, knob="--pool-memory")
    assert list(tmp_path.iterdir()) == []


RACER = """
import sys
from pathlib import Path
from baton.shared_memory import segment, segment_memory
from baton.errors import ConfigError
folder, size = Path(sys.argv[1]), int(sys.argv[2])
from baton.shared_memory.available_memory import AvailableMemory
def measure(folder):
    used = sum(path.stat().st_blocks * 512 for path in folder.glob("baton-*"))
    return AvailableMemory(size * 3 // 2 - used, "left", 0)
segment.measure_available_memory = segment_memory.measure_available_memory = measure
print("ready", flush=True)
sys.stdin.readline()
try:
    made = segment.create_segment(folder, "arena", size)
    print("made", flush=True)
except ConfigError as error:
    print("refused", flush=True)
sys.stdin.readline()
"""


def test_concurrent_creations_do_not_overcommit(tmp_path: Path) -> None:
    """There is memory for one and a half segments."""
    size = 32 * HUGE_PAGE
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for _ in range(2)
    ]
    try:
        said = []
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        for racer in racers:
            assert racer.stdout is not None
            said.append(racer.stdout.readline().strip())
        assert sorted(said) == ["made", "refused"]
    finally:
        for racer in racers:
            racer.communicate("end\n")


def test_the_reserve_is_stated() -> None:
    assert (rooms.RESERVE_SHARE, rooms.MAX_RESERVE_BYTES) == (0.1, GIB)


def test_private_memory_is_bounded_by_the_machine_and_the_group_and_not_by_a_folder(
    tmp_path: Path,
) -> None:
    files = FakeProcFiles(tmp_path / "k", tmp_path)
    files.write("proc/meminfo", f"MemAvailable: {8 * GIB >> 10} kB\n")
    room = measure_private_memory(files.proc, files.groups)
    assert (room.free_bytes, room.limited_by) == (
        8 * GIB,
        "of the machine's memory available",
    )
    files.write("groups/memory.max", str(GIB))
    files.write("groups/memory.current", str(GIB // 2))
    files.write("groups/memory.stat", "inactive_file 0\n")
    room = measure_private_memory(files.proc, files.groups)
    assert (room.free_bytes, room.limited_by) == (GIB // 2, "left in control group /")
