"""Arguments and outputs that no command can use: one line on standard error and an exit code."""

import os
import subprocess
import sys

import pytest

from tests.unit.cli.conftest import FakeCoordinatorServer, Run

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    "options",
    [
        ("--seed", "99999999999999999999"),
        ("--max-tokens", "99999999999"),
        ("--top-k", "99999999999"),
        ("--timeout", "inf"),
        ("--timeout", "nan"),
        ("--timeout", "1e308"),
    ],
)
def test_numbers_that_no_request_can_hold(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture, options: tuple[str, str]
) -> None:
    assert run("generate", "x", *options, "--endpoint", coordinator.endpoint) == 2
    assert options[0] in capsys.readouterr().err
    assert coordinator.requests == []


@pytest.mark.parametrize("endpoint", ["", "foo", ":1", "127.0.0.1:", "127.0.0.1:99999", "a:0"])
def test_endpoint_without_host_or_port(run: Run, capsys: Capture, endpoint: str) -> None:
    assert run("status", "--endpoint", endpoint) == 2
    assert capsys.readouterr().err == (
        f"error: --endpoint is {endpoint!r}: it must be HOST:PORT, with a port from 1 to 65535\n"
    )


@pytest.mark.parametrize("command", [("generate",), ("explain",), ("up", "--model")])
def test_argument_that_is_not_utf8(run: Run, capsys: Capture, command: tuple[str, ...]) -> None:
    assert run(*command, os.fsdecode(b"\xff")) == 2
    error = capsys.readouterr().err
    assert error == f"error: argument {len(command) + 1} is not valid UTF-8: '\\udcff'\n"


def test_key_that_no_header_holds(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    assert run("generate", "x", "--endpoint", coordinator.endpoint, "--api-key", "é") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: api_key has characters that no HTTP header can hold")


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_full_disk_is_one_line(
    coordinator: FakeCoordinatorServer, options: tuple[str, ...]
) -> None:
    command = [sys.executable, "-m", "baton.cli", "status", "--endpoint", coordinator.endpoint]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*command, *options], stdout=full, stderr=subprocess.PIPE, timeout=60, text=True
        )
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_closed_output_is_no_error() -> None:
    command = ["sh", "-c", 'exec "$0" -m baton.cli --version >&-', sys.executable]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=60, text=True)
    assert (done.returncode, done.stderr) == (0, "")
