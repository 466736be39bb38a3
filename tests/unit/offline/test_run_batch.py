"""A batch: every request is answered once, whatever ends a run."""

import asyncio
import errno
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton.errors import ConfigError
from offline.batch import __main__ as command
from offline.batch.batch_output import BatchOutput, OutputFailed
from offline.batch.run_batch import BatchCounts, answer_requests, open_batch
from offline.endpoint import Endpoint, EndpointUnavailable
from tests.unit.offline.batch_files import (
    assert_each_is_answered_once,
    read_lines,
    request_line,
    write_lines,
)

Handler = Callable[[httpx2.Request], Any]
NAMES = [f"id-{number}" for number in range(30)]


def answer(request: httpx2.Request) -> httpx2.Response:
    body = json.loads(request.content)
    choice = {"text": str(body["prompt"]), "finish_reason": "length"}
    return httpx2.Response(200, json={"choices": [choice], "usage": {"completion_tokens": 3}})


async def run(
    source: Path,
    target: Path,
    handler: Handler,
    retry: float = 1.0,
    advance: Callable[[int], None] = lambda tokens: None,
) -> BatchCounts:
    requests, output, counts = open_batch(source, target)
    with output:
        endpoint = Endpoint(
            "http://cluster",
            transport=httpx2.MockTransport(handler),
            max_in_flight=4,
            answer_seconds=5.0,
            retry_seconds=retry,
        )
        await answer_requests(requests, output, endpoint, counts, 4, advance)
        await endpoint.close()
    return counts


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", map(request_line, NAMES))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


async def test_every_request_is_answered(source: Path, target: Path) -> None:
    counts = await run(source, target, answer)
    assert (counts.num_requests, counts.answered, counts.failed) == (30, 30, 0)
    assert_each_is_answered_once(target, NAMES)


async def test_bad_lines_and_errors_are_counted_also_in_a_later_run(target: Path) -> None:
    lines = [request_line("a"), "oops", request_line("b") | {"method": "GET"}, request_line("c")]
    source = write_lines(target.parent / "in.jsonl", lines)

    def refuse_some(request: httpx2.Request) -> httpx2.Response:
        refuse_some.calls += 1  # type: ignore[attr-defined]
        if refuse_some.calls == 2:  # type: ignore[attr-defined]
            return httpx2.Response(400, json={"error": {"message": "no", "code": "x"}})
        return answer(request)

    refuse_some.calls = 0  # type: ignore[attr-defined]
    first = await run(source, target, refuse_some)
    assert (first.answered, first.failed) == (4, 3)
    again = await run(source, target, refuse_some)
    assert (again.answered_before, again.answered, again.failed) == (4, 0, 3)
    found = {line["custom_id"]: line for line in read_lines(target)}
    assert found["a"]["response"]["status_code"] == 200
    assert found[None]["error"]["line"] == 2
    assert found["b"]["error"]["code"] == "invalid_line"
    assert found["c"]["response"]["status_code"] == 400


async def test_an_unreachable_cluster_ends_the_run_and_the_next_one_goes_on(
    source: Path, target: Path
) -> None:
    left = 11

    def serve_some(request: httpx2.Request) -> httpx2.Response:
        nonlocal left
        left -= 1
        if left < 0:
            raise httpx2.ConnectError("refused")
        return answer(request)

    with pytest.raises(EndpointUnavailable):
        await run(source, target, serve_some, retry=1e-3)
    assert len(read_lines(target)) == 11
    counts = await run(source, target, answer)
    assert (counts.answered_before, counts.answered) == (11, 19)
    assert_each_is_answered_once(target, NAMES)


async def test_a_full_disk_ends_the_run(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, left = BatchOutput.append, 5

    def fill_disk(output: BatchOutput, line: bytes) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OutputFailed("full")
        append(output, line)

    with monkeypatch.context() as patched:
        patched.setattr(BatchOutput, "append", fill_disk)
        with pytest.raises(OutputFailed):
            await run(source, target, answer)
    await run(source, target, answer)
    assert_each_is_answered_once(target, NAMES)


@pytest.mark.parametrize(
    ("seconds", "max_bytes"), [(1e-3, 1 << 30), (60.0, 1), (60.0, 600), (60.0, 1 << 30)]
)
async def test_answers_are_reported_when_the_disk_has_them(
    source: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    max_bytes: int,
) -> None:
    """A power failure loses none that was reported. The end of the batch waits for no interval."""
    monkeypatch.setattr("offline.batch.answer_writer.SYNC_SECONDS", seconds)
    monkeypatch.setattr("offline.batch.answer_writer.MAX_UNSYNCED_BYTES", max_bytes)
    on_disk, fsync, reported = 0, os.fsync, 0

    def note_sync(fd: int) -> None:
        nonlocal on_disk
        fsync(fd)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            on_disk = len(read_lines(target))

    def advance(tokens: int) -> None:
        nonlocal reported
        reported += 1
        assert reported <= on_disk

    async def serve(request: httpx2.Request) -> httpx2.Response:
        await asyncio.sleep(0)
        return answer(request)

    monkeypatch.setattr(os, "fsync", note_sync)
    counts = await run(source, target, serve, advance=advance)
    assert reported == counts.answered == 30


async def test_answers_that_the_disk_may_lack_are_asked_for_again(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offline.batch.answer_writer.MAX_UNSYNCED_BYTES", 1)
    fsync, left = os.fsync, 7
    reported = 0

    def fail_later(fd: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    def advance(tokens: int) -> None:
        nonlocal reported
        reported += 1

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail_later)
        with pytest.raises(OutputFailed, match="cannot be brought to the disk"):
            await run(source, target, answer, advance=advance)
    assert 0 < reported == len(read_lines(target)) < 30
    with monkeypatch.context() as patched:  # the lines of an earlier run stay
        patched.setattr(os, "fsync", fail_later)
        with pytest.raises(OutputFailed):
            await run(source, target, answer)
    assert reported == len(read_lines(target))
    await run(source, target, answer)
    assert_each_is_answered_once(target, NAMES)


async def test_a_cancelled_run_answers_nothing_twice(source: Path, target: Path) -> None:
    seen = 0

    async def serve_slowly(request: httpx2.Request) -> httpx2.Response:
        nonlocal seen
        seen += 1
        if seen > 9:
            running.cancel()
        await asyncio.sleep(0)
        return answer(request)

    running = asyncio.ensure_future(run(source, target, serve_slowly))
    with pytest.raises(asyncio.CancelledError):
        await running
    assert 0 < len(read_lines(target)) < 30
    await run(source, target, answer)
    assert_each_is_answered_once(target, NAMES)


async def test_an_output_of_another_input_is_refused(source: Path, target: Path) -> None:
    await run(source, target, answer)
    lines = read_lines(target)
    write_lines(target, [*lines, lines[3]])
    with pytest.raises(ConfigError, match=r"out.jsonl line 31 answers custom_id .* again"):
        open_batch(source, target)
    write_lines(source, map(request_line, NAMES[:7]))
    with pytest.raises(ConfigError, match=r"out.jsonl line \d+ answers custom_id 'id-\d+', which"):
        open_batch(source, target)
    with pytest.raises(ConfigError, match="is the input and the output"):
        open_batch(source, source)


# the command


def test_the_command_answers_with_an_engine_in_its_process(
    source: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(source), str(target), "--engine", "paced", "--segment-dir", str(tmp_path)]
    options += ["--kv-memory", "8MiB", "--max-in-flight", "4"]
    assert command.main(options) == 0
    assert_each_is_answered_once(target, NAMES)
    write_lines(source, [*map(request_line, NAMES), request_line("bad", temperature=9)])
    assert command.main(options) == 1
    assert capsys.readouterr().err.splitlines() == [
        "30 of 30 requests answered",
        "31 of 31 requests answered, 30 of them in earlier runs, 1 with an error",
    ]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--url", "http://127.0.0.1:1"], 3, "error: http://127.0.0.1:1 cannot be used: "),
        (["--url", "nonsense"], 2, "error: --url nonsense is not an http:// or https:// URL"),
        (["--url", "http://h", "--model", "m"], 2, "error: --model m and --url http://h are given"),
        (["--url", "http://h", "--dtype", "float32"], 2, "error: dtype is a setting of an engine"),
        (["--model", "missing"], 2, "error: --model missing: there is no such folder"),
        (["--max-in-flight", "0"], 2, "error: max_in_flight is 0: it must be 1 to 65536"),
        (["--set", "ports=1"], 2, "error: there is no setting 'ports' of an engine"),
    ],
)
def test_errors_of_the_command_are_one_line(
    source: Path,
    target: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    code: int,
    message: str,
) -> None:
    assert command.main([str(source), str(target), *options]) == code
    text = capsys.readouterr().err
    assert text.startswith(message)
    assert text.count("\n") == 1


def test_a_file_whose_folder_cannot_be_searched_is_one_line(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Root may search every folder, so a name that is too long stands for one that it may not.
    assert command.main([str(source), "n" * 256, "--engine", "paced"]) == 2
    text = capsys.readouterr().err
    assert "File name too long" in text
    assert text.count("\n") == 1


def test_the_model_may_be_given_by_a_variable(
    source: Path, target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_MODEL", "missing")
    assert command.main([str(source), str(target)]) == 2
    assert "--model missing: there is no such folder" in capsys.readouterr().err


def test_an_interrupt_is_one_line(
    source: Path, target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_batch", interrupt)
    assert command.main([str(source), str(target)]) == 130
    assert capsys.readouterr().err == "interrupted: run the same command again to go on\n"


def test_help_describes_every_option() -> None:
    assert [action.dest for action in command.make_parser()._actions if not action.help] == []


def test_the_command_line_hands_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from baton.cli.main import app

    calls: list[Any] = []
    monkeypatch.setattr("os.execv", lambda *arguments: calls.append(arguments))
    given = ["in", "out", "--max-in-flight", "9", "--help"]
    CliRunner().invoke(app, ["run-batch", *given])
    assert calls == [(sys.executable, [sys.executable, "-m", "offline.batch", *given])]
