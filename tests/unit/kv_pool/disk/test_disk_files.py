"""The disk's file and journal: whose they are, what they hold, and what is wrong with them."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError, ShuttingDown
from baton.kv.blocks import KVLayout
from baton.process.clock import monotonic_clock
from kv_pool.common.block_rows import BlockRows
from kv_pool.core.disk.journal_records import JournalEntry, record_size
from kv_pool.core.eviction.policies import EVICTION_POLICIES
from kv_pool.disk.data_file import DISK_FILE_NAME, HEADER_BYTES, DiskFile, open_disk_file
from kv_pool.disk.journal_file import JOURNAL_FILE_NAME, DiskJournalFile
from kv_pool.disk.mount import DiskSettings, mount_disk

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
BLOCK = LAYOUT.block_bytes
SLOTS = 8
SIZE = HEADER_BYTES + SLOTS * BLOCK
DIGEST = "11" * 32


def open_test_file(
    folder: Path, size: int = SIZE, digest: str = DIGEST, layout: KVLayout = LAYOUT
) -> DiskFile:
    return open_disk_file(folder, size, digest, layout, lambda: True)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DiskFile]:
    file = open_test_file(tmp_path)
    yield file
    file.close()


def read_slot_after_reopen(folder: Path, slot: int = 3, **changed: Any) -> bytes | None:
    """What a slot holds when the file is opened again; None if it was begun anew."""
    file = open_test_file(folder, **changed)
    try:
        block = memoryview(bytearray(BLOCK))
        assert file.read_slot(slot, block)
        return None if file.is_new else bytes(block)
    finally:
        file.close()


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    file = open_test_file(tmp_path)
    assert file.is_new
    file.write_slot(3, memoryview(b"\7" * BLOCK))
    file.close()
    return tmp_path


def test_file_is_preallocated_and_private(file: DiskFile, tmp_path: Path) -> None:
    found = (tmp_path / DISK_FILE_NAME).stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == SIZE
    assert found.st_blocks * 512 >= SIZE


def test_written_slot_survives_reopen(filled: Path) -> None:
    assert read_slot_after_reopen(filled) == b"\7" * BLOCK


@pytest.mark.parametrize(
    "changed",
    [{"digest": "22" * 32}, {"size": SIZE + BLOCK}, {"layout": KVLayout(2, 1, 4, 4, "float32")}],
    ids=["model", "size", "layout"],
)
def test_file_of_another_model_layout_or_size_is_recreated(
    filled: Path, changed: dict[str, Any]
) -> None:
    assert read_slot_after_reopen(filled, **changed) is None


def test_header_with_a_flipped_bit_is_rejected(filled: Path) -> None:
    path = filled / DISK_FILE_NAME
    whole = path.read_bytes()
    header = whole[:HEADER_BYTES].rstrip(b"\0")
    for place in range(0, len(header), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        assert read_slot_after_reopen(filled) is None


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES, SIZE - 1])
def test_truncated_file_is_recreated(filled: Path, size: int) -> None:
    os.truncate(filled / DISK_FILE_NAME, size)
    assert read_slot_after_reopen(filled) is None
    assert (filled / DISK_FILE_NAME).stat().st_size == SIZE


def test_file_truncated_in_use_reads_up_to_the_cut(file: DiskFile, tmp_path: Path) -> None:
    os.truncate(tmp_path / DISK_FILE_NAME, HEADER_BYTES + BLOCK + BLOCK // 2)
    block = memoryview(bytearray(BLOCK))
    assert [file.read_slot(slot, block) for slot in range(3)] == [True, False, False]


def test_file_writable_by_others_is_recreated(filled: Path) -> None:
    (filled / DISK_FILE_NAME).chmod(0o620)
    assert read_slot_after_reopen(filled) is None
    assert stat.S_IMODE((filled / DISK_FILE_NAME).stat().st_mode) == 0o600


def test_file_locked_by_another_pool_is_refused(file: DiskFile, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="is in use by another pool: choose another folder with --pool-disk-dir"
    ):
        open_test_file(tmp_path)


def test_another_users_file_is_left_alone(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 4242)
        with pytest.raises(
            ConfigError, match=r"is not a regular file of user 4242 .*: choose another folder"
        ):
            open_test_file(filled)
    assert read_slot_after_reopen(filled) == b"\7" * BLOCK


@pytest.mark.parametrize(
    "make", [lambda path: path.mkdir(), lambda path: path.symlink_to("/etc/passwd"), os.mkfifo]
)
def test_non_regular_file_is_refused(tmp_path: Path, make: object) -> None:
    make(tmp_path / DISK_FILE_NAME)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="--pool-disk-dir"):
        open_test_file(tmp_path)


@pytest.mark.parametrize("name", [DISK_FILE_NAME, JOURNAL_FILE_NAME])
def test_hard_linked_file_is_refused(tmp_path: Path, name: str) -> None:
    """In a folder that others may write to, it might be anything of this user's."""
    mine = tmp_path / "mine"
    mine.write_bytes(b"dear to me")
    (tmp_path / name).hardlink_to(mine)
    memory = BlockRows(memoryview(bytearray(BLOCK)), BLOCK)
    with pytest.raises(
        ConfigError, match="without other hard links: choose another folder with --pool-disk-dir"
    ):
        mount_disk(
            DiskSettings(folder=tmp_path, size_bytes=SIZE),
            EVICTION_POLICIES["lru"],
            DIGEST,
            LAYOUT,
            memory,
            monotonic_clock,
            lambda _: None,
            lambda: True,
        )
    assert mine.read_bytes() == b"dear to me"


def test_unusable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--pool-disk-dir"):
        open_test_file(tmp_path / "file")


def test_a_disk_too_small_for_a_block_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=f"one block and the header take {HEADER_BYTES + BLOCK}: enlarge --pool-disk",
    ):
        open_test_file(tmp_path, size=HEADER_BYTES + BLOCK - 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
def test_a_full_disk_says_what_is_free_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ConfigError, match=rf"cannot hold {SIZE} bytes .* free\): lower --pool-disk"
    ):
        open_test_file(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_creation_stops_when_no_longer_wanted(tmp_path: Path) -> None:
    with pytest.raises(ShuttingDown):
        open_disk_file(tmp_path, SIZE, DIGEST, LAYOUT, lambda: False)
    assert list(tmp_path.iterdir()) == []


# the journal


def make_entry(slot: int, number: int = 0) -> JournalEntry:
    return JournalEntry(
        slot, 0, number, bytes([slot]) * 32, bytes([slot, number % 256]) * 16, bytes(16)
    )


def open_journal(folder: Path, file: DiskFile) -> tuple[DiskJournalFile, list[JournalEntry]]:
    journal = DiskJournalFile(folder, file, LAYOUT.block_size)
    return journal, list(journal.replay_entries())


def test_journal_continues_after_reopen(file: DiskFile, tmp_path: Path) -> None:
    for number in range(3):
        journal, known = open_journal(tmp_path, ReopenedDiskFile(file))
        assert known == [make_entry(slot) for slot in range(number)]
        journal.append_entry(make_entry(number))
        journal.close()
    assert stat.S_IMODE((tmp_path / JOURNAL_FILE_NAME).stat().st_mode) == 0o600


def test_journal_is_truncated_after_a_damaged_record(file: DiskFile, tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path, file)
    for slot in range(4):
        journal.append_entry(make_entry(slot))
    size = journal.size_bytes // 4
    journal.close()
    path = tmp_path / JOURNAL_FILE_NAME
    bad = bytearray(path.read_bytes())
    bad[size + 5] ^= 1
    path.write_bytes(bad)
    journal, known = open_journal(tmp_path, ReopenedDiskFile(file))
    assert known == [make_entry(0)]
    journal.append_entry(make_entry(7))
    journal.close()
    journal, known = open_journal(tmp_path, ReopenedDiskFile(file))
    assert known == [make_entry(0), make_entry(7)]
    journal.close()


def test_journal_is_compacted_and_bounded(file: DiskFile, tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path, file)
    most = 0
    for number in range(5000):
        journal.append_entry(make_entry(number % SLOTS, number))
        most = max(most, journal.size_bytes)
    journal.close()
    assert most <= (2 * SLOTS + 1024) * record_size(LAYOUT.block_size)
    journal, known = open_journal(tmp_path, ReopenedDiskFile(file))
    last = {entry.slot: entry for entry in known}
    assert [last[slot].checksum for slot in range(SLOTS)] == list(range(4992, 5000))
    assert sorted(path.name for path in tmp_path.iterdir()) == [JOURNAL_FILE_NAME, DISK_FILE_NAME]
    journal.close()


def test_a_new_file_has_a_new_journal(filled: Path) -> None:
    file = open_test_file(filled)
    journal, _ = open_journal(filled, ReopenedDiskFile(file))
    journal.append_entry(make_entry(1))
    journal.close()
    file.close()
    file = open_test_file(filled, digest="22" * 32)
    journal, known = open_journal(filled, file)
    assert known == []
    assert journal.size_bytes == (filled / JOURNAL_FILE_NAME).stat().st_size == 0
    journal.close()
    file.close()


class ReopenedDiskFile(DiskFile):
    """The same file as after a restart: not fresh."""

    def __init__(self, file: DiskFile) -> None:
        self.num_slots, self.generation, self.is_new = file.num_slots, file.generation, False
