import errno
import fcntl
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError, PeerUnreachable, ShuttingDown
from baton.shared_memory.memory_map import HUGE_PAGE
from baton.shared_memory.segment import (
    compute_host_id,
    create_segment,
    is_holder_alive,
    open_peer_segment,
    remove_stale_segments,
    round_up_segment_bytes,
)

SIZE = HUGE_PAGE

HOLD = """
import sys
from pathlib import Path
from baton.shared_memory.fence import ArenaFences
from baton.shared_memory.segment import create_segment
held = create_segment(Path(sys.argv[1]), "arena", int(sys.argv[2]))
fences = ArenaFences(held.path)
print(held.name, flush=True)
sys.stdin.read()
"""


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 24))
def test_a_size_is_the_next_multiple_of_block_and_huge_page(num_bytes: int, block: int) -> None:
    size = round_up_segment_bytes(num_bytes, block)
    unit = math.lcm(block, HUGE_PAGE)
    assert size % unit == 0
    assert num_bytes <= size < max(num_bytes, 1) + unit


def test_a_segment_is_private_zeroed_aligned_locked_and_gone_after_close(tmp_path: Path) -> None:
    segment = create_segment(tmp_path, "arena", SIZE)
    try:
        assert re.fullmatch(r"baton-arena-[0-9a-f]{32}", segment.name)
        assert segment.path.stat().st_mode & 0o777 == 0o600
        assert segment.path.stat().st_blocks * 512 >= SIZE
        assert len(segment.view) == SIZE
        assert bytes(segment.view[:4096]) == bytes(4096)
        assert is_holder_alive(tmp_path, segment.name)
        segment.view[SIZE - 1] = 7
        fd, size = open_peer_segment(tmp_path, segment.name)
        assert size == SIZE
        assert os.pread(fd, 1, SIZE - 1) == b"\x07"
        os.close(fd)
    finally:
        segment.close()
    segment.close()
    assert list(tmp_path.iterdir()) == []


def test_a_descriptor_is_not_inherited(tmp_path: Path) -> None:
    """A lock that a child process shared would outlive its holder."""
    segment = create_segment(tmp_path, "arena", SIZE)
    try:
        assert not os.get_inheritable(segment._fd)
    finally:
        segment.close()


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
def test_a_full_folder_is_an_error_that_names_the_knobs(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(ConfigError, match=r"cannot hold 2097152 bytes.*--kv-memory.*--segment-dir"):
        create_segment(tmp_path, "arena", SIZE)
    assert list(tmp_path.iterdir()) == []


def test_a_really_full_tmpfs_is_an_error_and_no_sigbus(tmp_path: Path) -> None:
    """In a mount namespace of its own, with 4 MiB of tmpfs."""
    code = (
        "import sys; from pathlib import Path\n"
        "from baton.shared_memory.segment import create_segment\n"
        "from baton.errors import ConfigError\n"
        "try: create_segment(Path(sys.argv[1]), 'arena', 16 << 20)\n"
        "except ConfigError as error: print('refused:', error)\n"
    )
    script = f'mount -t tmpfs -o size=4m none "$1" && "{sys.executable}" -c "$2" "$1"'
    found = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", str(tmp_path), code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[4],
        timeout=60,
    )
    if "unshare" in found.stderr or "mount:" in found.stderr:
        pytest.skip(f"no mount namespace here: {found.stderr.strip()}")
    assert found.stdout.startswith("refused:"), (found.returncode, found.stderr)


def test_creation_stops_when_no_longer_wanted(tmp_path: Path) -> None:
    looks = iter([True, False])
    with pytest.raises(ShuttingDown):
        create_segment(tmp_path, "pool", 100 * HUGE_PAGE, is_wanted=lambda: next(looks))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--segment-dir"):
        create_segment(tmp_path / "missing", "arena", SIZE)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../passwd",
        "/etc/passwd",
        "baton-arena-xyz",
        "baton-arena-" + "0" * 31,
        "baton-a/../b-" + "0" * 32,
    ],
)
def test_segment_name_with_a_path_is_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(PeerUnreachable, match="is not a segment name"):
        open_peer_segment(tmp_path, name)


def test_a_peers_segment_must_be_a_file_of_the_right_size(tmp_path: Path) -> None:
    name = "baton-arena-" + "0" * 32
    with pytest.raises(PeerUnreachable, match="No such file"):
        open_peer_segment(tmp_path, name)
    (tmp_path / name).symlink_to("/etc/passwd")
    with pytest.raises(PeerUnreachable):
        open_peer_segment(tmp_path, name)
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(b"short")
    with pytest.raises(PeerUnreachable, match="5 bytes"):
        open_peer_segment(tmp_path, name)


def test_stale_segments_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[4]
    (tmp_path / "baton-notes").write_text("somebody else's")
    live = create_segment(tmp_path, "arena", SIZE)
    owner_process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), str(SIZE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    )
    with owner_process:
        assert owner_process.stdout is not None
        name = owner_process.stdout.readline().strip()
        assert remove_stale_segments(tmp_path) == []
        assert is_holder_alive(tmp_path, name)
        owner_process.send_signal(signal.SIGKILL)
        owner_process.wait()
    try:
        assert not is_holder_alive(tmp_path, name)
        assert sorted(remove_stale_segments(tmp_path)) == [name, f"{name}.fence"]
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            ["baton-notes", live.name]
        )
    finally:
        live.close()


def test_creation_retries_when_removed_before_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    swept: list[str] = []

    def sweeper_first(fd: int, how: int) -> None:
        if not swept:
            (path,) = tmp_path.iterdir()
            path.unlink()
            swept.append(path.name)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", sweeper_first)
    segment = create_segment(tmp_path, "arena", SIZE)
    try:
        assert segment.path.exists()
        assert swept != [segment.name]
    finally:
        segment.close()


def test_host_id_depends_on_folder_and_boot(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert compute_host_id(tmp_path) == compute_host_id(tmp_path)
    assert compute_host_id(tmp_path) != compute_host_id(other)
