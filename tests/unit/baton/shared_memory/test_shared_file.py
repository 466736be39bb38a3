"""The last user of a shared file removes it. The users in these tests are one process."""

import fcntl
import os
from pathlib import Path

import pytest

from baton.shared_memory.shared_file import release_shared_file


def open_as_user(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")


def test_the_last_user_removes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "used"
    first, second = open_as_user(path), open_as_user(path)
    release_shared_file(path, first, os.getpid())
    assert path.exists()
    release_shared_file(path, second, os.getpid())
    assert not path.exists()
    assert not is_open(first)
    assert not is_open(second)


def test_a_process_that_did_not_open_the_file_only_closes_it(tmp_path: Path) -> None:
    path = tmp_path / "used"
    fd = open_as_user(path)
    release_shared_file(path, fd, os.getpid() + 1)
    assert path.exists()
    assert not is_open(fd)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_was_removed_before_is_no_error(tmp_path: Path, is_replaced: bool) -> None:
    path = tmp_path / "used"
    fd = open_as_user(path)
    path.unlink()
    if is_replaced:
        path.touch()
    release_shared_file(path, fd, os.getpid())
    assert path.exists() == is_replaced
    assert not is_open(fd)
