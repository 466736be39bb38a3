import errno
import os
from pathlib import Path

import pytest

from baton.cli.supervisor.rotating_file import RotatingFile


def write_text(file: RotatingFile, text: str) -> None:
    data = memoryview(text.encode())
    assert file.write(data) == len(data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_are_bounded_in_size_and_number_and_the_newest_are_kept(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "up.log", 100, 2)
    for number in range(1000):
        write_text(file, f"line {number:04}\n")
    assert names(tmp_path) == ["up.log", "up.log.1", "up.log.2"]
    whole = "".join((tmp_path / name).read_text() for name in ("up.log.2", "up.log.1", "up.log"))
    assert whole.splitlines() == [
        f"line {number:04}" for number in range(1000 - len(whole) // 10, 1000)
    ]
    assert max((tmp_path / name).stat().st_size for name in names(tmp_path)) <= 110


def test_without_backups_the_file_begins_anew(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "up.log", 20, 0)
    for number in range(5):
        write_text(file, f"line {number:04}\n")
    assert names(tmp_path) == ["up.log"]
    assert (tmp_path / "up.log").read_text() == "line 0004\n"


def test_a_rotation_that_fails_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "up.log"
    file = RotatingFile(path, 10, 1)
    write_text(file, "a first line\n")
    (tmp_path / "up.log.1").mkdir()  # where the full file is to go
    for _ in range(2):
        with pytest.raises(OSError, match="directory"):
            write_text(file, "lost\n")
    (tmp_path / "up.log.1").rmdir()
    write_text(file, "here\n")
    assert path.read_text() == "here\n"
    assert (tmp_path / "up.log.1").read_text() == "a first line\n"


def test_no_backup_is_lost_while_no_new_file_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: the full file has been moved away, and there is no room for another."""
    path = tmp_path / "up.log"
    file = RotatingFile(path, 10, 3)
    for number in range(4):
        write_text(file, f"a line {number}\n\n")

    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "open", no_room)
        for _ in range(5):
            with pytest.raises(OSError, match="No space"):
                write_text(file, "lost\n")
    write_text(file, "here\n")
    assert [(tmp_path / name).read_text().strip() for name in names(tmp_path)] == [
        "here",
        "a line 3",
        "a line 2",
        "a line 1",
    ]


def test_a_file_that_another_has_moved_away_is_replaced_and_no_backup_moves(tmp_path: Path) -> None:
    path = tmp_path / "up.log"
    file = RotatingFile(path, 10, 1)
    write_text(file, "first line\n")
    write_text(file, "second line\n")
    path.rename(tmp_path / "moved")
    write_text(file, "third line\n")
    assert {name: (tmp_path / name).read_text() for name in names(tmp_path)} == {
        "moved": "second line\n",
        "up.log": "third line\n",
        "up.log.1": "first line\n",
    }


def test_a_file_that_the_operator_has_emptied_is_written_on(tmp_path: Path) -> None:
    path = tmp_path / "up.log"
    file = RotatingFile(path, 20, 1)
    write_text(file, "some line\n")
    os.truncate(path, 0)
    write_text(file, "another\n")
    assert path.read_text() == "another\n"


def test_a_descriptor_follows_the_current_file(tmp_path: Path) -> None:
    """What a library writes to standard error by itself lands beside our own lines."""
    path = tmp_path / "up.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    file = RotatingFile(path, 10, 1, descriptor=descriptor)
    for text in ("first line\n", "second\n"):
        write_text(file, text)
    os.write(descriptor, b"by itself\n")
    assert path.read_text() == "second\nby itself\n"
    os.close(descriptor)
    file.close()
