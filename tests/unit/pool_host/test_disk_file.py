"""The disk's file and journal: whose they are, what they hold, and what is wrong with them."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.clock import steady
from baton.errors import ConfigError, Draining
from baton.kv_layout import KVLayout
from kv_pool.block_rows import BlockRows
from kv_pool.core.disk_journal import Entry, record_bytes
from kv_pool.core.policies import POLICIES
from kv_pool.disk_file import HEADER_BYTES, NAME, DiskFile, open_disk
from kv_pool.disk_journal_file import NAME as JOURNAL
from kv_pool.disk_journal_file import DiskJournal
from kv_pool.disk_mount import DiskTerms, mount

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
BLOCK = LAYOUT.block_bytes
SLOTS = 8
SIZE = HEADER_BYTES + SLOTS * BLOCK
DIGEST = "11" * 32


def opened(folder: Path, size: int = SIZE, digest: str = DIGEST, layout: KVLayout = LAYOUT) -> DiskFile:
    return open_disk(folder, size, digest, layout, lambda: True)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DiskFile]:
    made = opened(tmp_path)
    yield made
    made.close()


def held(folder: Path, slot: int = 3, **changed: object) -> bytes | None:
    """What a slot holds when the file is opened again; None if it was begun anew."""
    file = opened(folder, **changed)  # type: ignore[arg-type]
    try:
        block = memoryview(bytearray(BLOCK))
        assert file.read(slot, block)
        return None if file.fresh else bytes(block)
    finally:
        file.close()


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    file = opened(tmp_path)
    assert file.fresh
    file.write(3, memoryview(b"\7" * BLOCK))
    file.close()
    return tmp_path


def test_it_has_its_size_from_the_beginning_and_is_this_users_alone(file: DiskFile, tmp_path: Path) -> None:
    found = (tmp_path / NAME).stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == SIZE
    assert found.st_blocks * 512 >= SIZE


def test_what_was_written_is_there_again(filled: Path) -> None:
    assert held(filled) == b"\7" * BLOCK


@pytest.mark.parametrize(
    "changed",
    [{"digest": "22" * 32}, {"size": SIZE + BLOCK}, {"layout": KVLayout(2, 1, 4, 4, "float32")}],
    ids=["model", "size", "layout"],
)
def test_it_is_begun_anew_for_anything_else(filled: Path, changed: dict[str, object]) -> None:
    assert held(filled, **changed) is None


def test_a_header_with_any_flipped_bit_is_none(filled: Path) -> None:
    path = filled / NAME
    whole = path.read_bytes()
    said = whole[:HEADER_BYTES].rstrip(b"\0")
    for place in range(0, len(said), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        assert held(filled) is None


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES, SIZE - 1])
def test_a_file_that_was_cut_off_is_begun_anew(filled: Path, size: int) -> None:
    os.truncate(filled / NAME, size)
    assert held(filled) is None
    assert (filled / NAME).stat().st_size == SIZE


def test_a_file_that_is_cut_off_while_it_is_used_ends_there(file: DiskFile, tmp_path: Path) -> None:
    os.truncate(tmp_path / NAME, HEADER_BYTES + BLOCK + BLOCK // 2)
    block = memoryview(bytearray(BLOCK))
    assert [file.read(slot, block) for slot in range(3)] == [True, False, False]


def test_what_others_could_write_is_not_believed(filled: Path) -> None:
    (filled / NAME).chmod(0o620)
    assert held(filled) is None
    assert stat.S_IMODE((filled / NAME).stat().st_mode) == 0o600


def test_a_second_pool_does_not_get_it(file: DiskFile, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is another pool's: choose another folder with --pool-disk-dir"):
        opened(tmp_path)


def test_another_users_file_is_left_alone(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 4242)
        with pytest.raises(ConfigError, match=r"is no file of user 4242 .*: choose another folder"):
            opened(filled)
    assert held(filled) == b"\7" * BLOCK


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.symlink_to("/etc/passwd"), os.mkfifo])
def test_what_is_no_file_is_refused(tmp_path: Path, make: object) -> None:
    make(tmp_path / NAME)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="--pool-disk-dir"):
        opened(tmp_path)


@pytest.mark.parametrize("name", [NAME, JOURNAL])
def test_what_has_another_name_too_is_left_alone(tmp_path: Path, name: str) -> None:
    """In a folder that others may write to, it might be anything of this user's."""
    mine = tmp_path / "mine"
    mine.write_bytes(b"dear to me")
    (tmp_path / name).hardlink_to(mine)
    memory = BlockRows(memoryview(bytearray(BLOCK)), BLOCK)
    with pytest.raises(ConfigError, match="under this name alone: choose another folder with --pool-disk-dir"):
        mount(DiskTerms(tmp_path, SIZE), POLICIES["lru"], DIGEST, LAYOUT, memory, steady, lambda _: None, lambda: True)
    assert mine.read_bytes() == b"dear to me"


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--pool-disk-dir"):
        opened(tmp_path / "file")


def test_a_disk_too_small_for_a_block_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"one block and the header take {HEADER_BYTES + BLOCK}: enlarge --pool-disk"):
        opened(tmp_path, size=HEADER_BYTES + BLOCK - 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
def test_a_full_disk_says_what_is_free_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=rf"cannot hold {SIZE} bytes .* free\): lower --pool-disk"):
        opened(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_making_one_ends_when_nobody_wants_it_any_more(tmp_path: Path) -> None:
    with pytest.raises(Draining):
        open_disk(tmp_path, SIZE, DIGEST, LAYOUT, lambda: False)
    assert list(tmp_path.iterdir()) == []


# the journal


def entry(slot: int, number: int = 0) -> Entry:
    return Entry(slot, 0, number, bytes([slot]) * 32, bytes([slot, number % 256]) * 16, bytes(16))


def journal_of(folder: Path, file: DiskFile) -> tuple[DiskJournal, list[Entry]]:
    journal = DiskJournal(folder, file, LAYOUT.block_size)
    return journal, list(journal.entries())


def test_a_journal_goes_on_where_it_ended(file: DiskFile, tmp_path: Path) -> None:
    for number in range(3):
        journal, known = journal_of(tmp_path, DiskFileAgain(file))
        assert known == [entry(slot) for slot in range(number)]
        journal.append(entry(number))
        journal.close()
    assert stat.S_IMODE((tmp_path / JOURNAL).stat().st_mode) == 0o600


def test_what_follows_a_damaged_record_is_cut_off_for_good(file: DiskFile, tmp_path: Path) -> None:
    journal, _ = journal_of(tmp_path, file)
    for slot in range(4):
        journal.append(entry(slot))
    size = journal.size // 4
    journal.close()
    path = tmp_path / JOURNAL
    bad = bytearray(path.read_bytes())
    bad[size + 5] ^= 1
    path.write_bytes(bad)
    journal, known = journal_of(tmp_path, DiskFileAgain(file))
    assert known == [entry(0)]
    journal.append(entry(7))
    journal.close()
    journal, known = journal_of(tmp_path, DiskFileAgain(file))
    assert known == [entry(0), entry(7)]
    journal.close()


def test_it_is_compacted_and_stays_bounded(file: DiskFile, tmp_path: Path) -> None:
    journal, _ = journal_of(tmp_path, file)
    most = 0
    for number in range(5000):
        journal.append(entry(number % SLOTS, number))
        most = max(most, journal.size)
    journal.close()
    assert most <= (2 * SLOTS + 1024) * record_bytes(LAYOUT.block_size)
    journal, known = journal_of(tmp_path, DiskFileAgain(file))
    last = {one.slot: one for one in known}
    assert [last[slot].checksum for slot in range(SLOTS)] == list(range(4992, 5000))
    assert sorted(path.name for path in tmp_path.iterdir()) == [JOURNAL, NAME]
    journal.close()


def test_a_new_file_has_a_new_journal(filled: Path) -> None:
    file = opened(filled)
    journal, _ = journal_of(filled, DiskFileAgain(file))
    journal.append(entry(1))
    journal.close()
    file.close()
    file = opened(filled, digest="22" * 32)
    journal, known = journal_of(filled, file)
    assert known == []
    assert journal.size == (filled / JOURNAL).stat().st_size == 0
    journal.close()
    file.close()


class DiskFileAgain(DiskFile):
    """The same file as after a restart: not fresh."""

    def __init__(self, file: DiskFile) -> None:
        self.slots, self.generation, self.fresh = file.slots, file.generation, False
