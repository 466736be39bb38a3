"""The input of a batch: its lines, repeated ids, and what is answered already."""

import json
import os
from pathlib import Path

import pytest
import xxhash

from baton.errors import ConfigError
from offline.batch import batch_input
from offline.batch.batch_input import BatchInput
from offline.batch.batch_lines import BadLine, BatchRequest
from tests.unit.offline.batch_files import request_line, write_lines


def summarize(requests: BatchInput) -> list[tuple[int, str | None]]:
    """The number and the id of each request that is left; a bad line's with a minus."""
    return [
        (-each.number if isinstance(each, BadLine) else each.number, each.custom_id)
        for each in requests.iter_unanswered()
    ]


def test_blank_lines_are_skipped_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [request_line("a"), "", "   ", request_line("b"), "oops"]
    write_lines(path, lines)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n").rstrip())
    requests = BatchInput(path)
    assert requests.num_requests == 3
    assert summarize(requests) == [(1, "a"), (4, "b"), (-5, None)]


def test_what_is_answered_is_left_out(tmp_path: Path) -> None:
    names = [f"id-{number}" for number in range(50)]
    lines: list[object] = [request_line(name) for name in names]
    lines[20] = "{}"
    requests = BatchInput(write_lines(tmp_path / "in.jsonl", lines))
    for name in names[::2]:
        expected = None if name == "id-20" else False
        assert requests.mark_answered(name, None) is expected
    assert requests.mark_answered(None, 21) is False
    assert requests.mark_answered(None, 21) is True
    assert requests.mark_answered("id-4", 5) is True
    assert requests.mark_answered(None, 20) is None
    assert requests.mark_answered(None, None) is None
    assert [custom_id for _, custom_id in summarize(requests)] == names[1::2]


def test_a_repeated_id_names_both_lines(tmp_path: Path) -> None:
    lines = [request_line(name) for name in ("a", "b", "c", "b", "d")]
    lines[3]["method"] = "GET"
    path = write_lines(tmp_path / "in.jsonl", lines)
    with pytest.raises(ConfigError) as caught:
        BatchInput(path)
    assert str(caught.value) == (
        f"{path}: custom_id 'b' is on line 2 and on line 4: every line needs an id of its own"
    )


def test_ids_with_the_same_hash_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = xxhash.xxh3_64_intdigest

    def hash_badly(text: bytes, seed: int) -> int:
        return real(text, seed) % (7 if seed < 2 else 2**64)

    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", hash_badly)
    names = [f"id-{number}" for number in range(20)]
    requests = BatchInput(write_lines(tmp_path / "in.jsonl", map(request_line, names)))
    assert [requests.mark_answered(name, None) for name in names[:10]] == [False] * 10
    assert [custom_id for _, custom_id in summarize(requests)] == names[10:]


def test_a_line_that_is_too_long_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_input, "MAX_LINE_BYTES", 200)
    longest = json.dumps(request_line("b")).ljust(200)
    lines = [request_line("a"), "x" * 201, "y" * 999, longest, "z" * 402]
    path = write_lines(tmp_path / "in.jsonl", lines)
    path.write_bytes(path.read_bytes().rstrip())
    requests = BatchInput(path)
    assert summarize(requests) == [(1, "a"), (-2, None), (-3, None), (4, "b"), (-5, None)]
    errors = [str(each) for each in requests.iter_unanswered() if isinstance(each, BadLine)]
    assert errors[0] == "line 2: it has more than 200 bytes: shorten it"


def test_requests_are_read_when_they_are_needed(tmp_path: Path) -> None:
    requests = BatchInput(write_lines(tmp_path / "in.jsonl", map(request_line, "abc")))
    reader = requests.iter_unanswered()
    first = next(reader)
    assert isinstance(first, BatchRequest)
    assert first.custom_id == "a"


@pytest.mark.parametrize("changed", ["ac", "bac", "a", "axc"])
def test_a_file_that_changes_meanwhile_is_an_error(tmp_path: Path, changed: str) -> None:
    """Else the lines that are answered would not be those that were marked."""
    path = write_lines(tmp_path / "in.jsonl", map(request_line, "abc"))
    requests = BatchInput(path)
    requests.mark_answered("a", None)
    write_lines(path, map(request_line, changed))
    with pytest.raises(ConfigError, match="has changed since it was read first"):
        list(requests.iter_unanswered())


def test_an_empty_file_has_no_requests(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.touch()
    requests = BatchInput(path)
    assert (requests.num_requests, summarize(requests)) == (0, [])
    assert requests.mark_answered("a", None) is None


def test_what_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing cannot be read: No such file"):
        BatchInput(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        BatchInput(tmp_path)
    with pytest.raises(ConfigError, match="/dev/null is not a file, and it is read twice"):
        BatchInput(Path(os.devnull))
