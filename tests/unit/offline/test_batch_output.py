"""The output of a batch: whole lines only, whatever happens while one is written."""

import errno
import os
from pathlib import Path

import pytest

from baton.errors import ConfigError, DeadlineExceeded
from offline.batch.batch_lines import encode_error
from offline.batch.batch_output import BatchOutput, OutputFailed

LINE = encode_error(1, "a", DeadlineExceeded("x"))
OTHER = encode_error(2, "b", DeadlineExceeded("y"))


@pytest.mark.parametrize(
    "torn",
    [b"", LINE[:1], LINE[:-1], LINE[: len(LINE) // 2]],
    ids=["empty", "one byte", "no newline", "half"],
)
def test_a_torn_last_line_is_removed(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(LINE + OTHER + torn)
    with BatchOutput(path) as output:
        assert [key.custom_id for _, key in output.read_answers()] == ["a", "b"]
        output.append(LINE)
    assert path.read_bytes() == LINE + OTHER + LINE


@pytest.mark.parametrize("line", [b"hello\n", b"{}\n", b"\n", b"\x00\x00\n", b"\xff\n"])
def test_a_line_that_is_no_answer_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(LINE + line + OTHER[:9])
    with BatchOutput(path) as output, pytest.raises(ConfigError, match=r"out.jsonl line 2 is no"):
        list(output.read_answers())
    assert path.read_bytes() == LINE + line + OTHER[:9]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "out.jsonl", os.write
    with BatchOutput(path) as output:
        list(output.read_answers())
        output.append(LINE)
        left = iter([7, 0])

        def fill_disk(fd: int, data: bytes) -> int:
            if room := next(left):
                return write(fd, data[:room])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patched:
            patched.setattr(os, "write", fill_disk)
            with pytest.raises(OutputFailed) as caught:
                output.append(OTHER)
        assert str(caught.value) == (
            f"{path} cannot be written (No space left on device): make room and run the same "
            "command again, which goes on where this one ends"
        )
        assert path.read_bytes() == LINE
        output.append(OTHER)
    assert path.read_bytes() == LINE + OTHER


def test_a_torn_line_that_could_not_be_cut_is_cut_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that were on their way are still written after the first error."""
    path, write = tmp_path / "out.jsonl", os.write
    with BatchOutput(path) as output:
        output.append(LINE)
        sizes = iter([7])

        def tear(fd: int, data: bytes) -> int:
            if size := next(sizes, 0):
                return write(fd, data[:size])
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def fail_to_cut(fd: int, size: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patched:
            patched.setattr(os, "write", tear)
            patched.setattr(os, "ftruncate", fail_to_cut)
            with pytest.raises(OutputFailed, match="cannot be cut: Input/output error"):
                output.append(OTHER)
        assert path.read_bytes() == LINE + OTHER[:7]
        output.append(OTHER)
    assert path.read_bytes() == LINE + OTHER


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """To read a pipe for earlier answers would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(ConfigError, match="is not a file, and it is read at the next start"):
            BatchOutput(path)


def test_two_batches_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with BatchOutput(path), pytest.raises(ConfigError, match="is being written by another"):
        BatchOutput(path)
    BatchOutput(path).close()


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"out.jsonl cannot be opened: No such file"):
        BatchOutput(tmp_path / "missing" / "out.jsonl")


def test_a_failure_that_nobody_heard_of_is_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports it to one call only, whose caller may have been cancelled."""
    path = tmp_path / "out.jsonl"

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    output = BatchOutput(path)
    list(output.read_answers())
    output.append(LINE)
    output.sync()
    output.append(OTHER)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OutputFailed):
            output.sync()
    with pytest.raises(OutputFailed, match="cannot be brought to the disk"):
        output.close()
    assert path.read_bytes() == LINE
