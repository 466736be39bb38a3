import os
import threading
from pathlib import Path

from baton.shared_memory.byte_locks import ByteLockWait, try_lock_byte, unlock_byte


def open_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def test_one_description_holds_a_byte_until_it_is_unlocked(tmp_path: Path) -> None:
    first, second = (open_file(tmp_path / "file") for _ in range(2))
    assert try_lock_byte(first, 7)
    assert try_lock_byte(first, 7)
    assert not try_lock_byte(second, 7)
    assert try_lock_byte(second, 8)
    unlock_byte(first, 7)
    assert try_lock_byte(second, 7)
    os.close(first)
    os.close(second)


def test_a_wait_ends_when_the_holder_closes_its_file(tmp_path: Path) -> None:
    holder, waiter = (open_file(tmp_path / "file") for _ in range(2))
    assert try_lock_byte(holder, 0)
    wait = ByteLockWait(waiter, 0)
    os.close(holder)
    assert wait.finish(60) == waiter
    other = open_file(tmp_path / "file")
    assert not try_lock_byte(other, 0)
    os.close(waiter)
    assert try_lock_byte(other, 0)
    os.close(other)


def test_a_wait_that_was_given_up_does_not_keep_the_byte(tmp_path: Path) -> None:
    holder, waiter = (open_file(tmp_path / "file") for _ in range(2))
    assert try_lock_byte(holder, 0)
    wait = ByteLockWait(waiter, 0)
    assert wait.finish(0.01) is None
    os.close(holder)
    for thread in threading.enumerate():
        if thread.name == "byte-lock":
            thread.join(60)
    other = open_file(tmp_path / "file")
    assert try_lock_byte(other, 0)
    os.close(other)


def test_a_file_that_cannot_be_locked_ends_the_wait() -> None:
    reader, writer = os.pipe()
    assert ByteLockWait(reader, 0).finish(60) is None
    os.close(writer)
