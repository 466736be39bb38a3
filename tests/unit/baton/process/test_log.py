"""Standard error of a process: JSON lines without prompts, from Baton, Python and libraries."""

import json
import subprocess
import sys
from typing import Any

import pytest

SECRET = "my-diagnosis"
START = f"""
import asyncio, logging, os, threading, warnings
from baton.process import log, log_capture, runtime
log.configure_logging("info", "json", node="n")
log_capture.install_log_capture()
secret = {SECRET!r}
def fail(): raise ValueError(secret)
"""


MAIN = "async def main(stop):\n"


def lines_of(code: str, status: int = 0) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", START + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert SECRET not in done.stderr
    return [json.loads(line) for line in done.stderr.splitlines()]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("fail()", 1),
        ("log.get_logger('x').info('said', prompt=secret)", 0),
        ("try: fail()\nexcept ValueError: log.get_logger('x').exception('failed')", 0),
        ("try: fail()\nexcept ValueError: logging.getLogger('grpc').exception('in a library')", 0),
        ("logging.getLogger('asyncio').error('never retrieved\\nfuture: <%s>' % secret)", 0),
        ("threading.Thread(target=fail).start()", 0),
        (
            MAIN
            + " asyncio.get_running_loop().call_soon(fail)\n await asyncio.sleep(0)\n"
            + "runtime.run_event_loop(main)",
            0,
        ),
        (
            MAIN
            + " task = asyncio.create_task(asyncio.to_thread(fail))\n await asyncio.wait([task])\n"
            + "runtime.run_event_loop(main)",
            0,
        ),
        ("async def main(stop): fail()\nruntime.run_event_loop(main)", 1),
        ("class Ends:\n def __del__(self): fail()\nEnds()", 0),
        (
            "group = ExceptionGroup(secret, [ValueError(secret)])\n"
            "log.get_logger('x').error('group', **log.get_error_fields(group))",
            0,
        ),
        ("class Odd:\n def __repr__(self): fail()\nlog.get_logger('x').info('odd', it=Odd())", 0),
    ],
)
def test_logged_error_has_kind_and_place_only(code: str, status: int) -> None:
    lines = lines_of(code + "\n", status)
    assert lines
    assert "ValueError" in json.dumps(lines) or "secret" in code


def test_a_line_of_any_thread_names_its_node() -> None:
    (line,) = lines_of("threading.Thread(target=lambda: log.get_logger('x').info('said')).start()")
    assert (line["node"], line["event"], line["part"]) == ("n", "said", "x")


def test_a_warning_of_a_library_is_a_line() -> None:
    (line,) = lines_of("warnings.warn('old words')")
    assert "old words" in line["event"]


def test_what_was_logged_before_an_exit_at_once_is_there() -> None:
    (line,) = lines_of("log.get_logger('x').info('said')\nlog.flush_log()\nos._exit(0)")
    assert line["event"] == "said"


def test_a_long_field_is_cut_and_the_line_still_json() -> None:
    (line,) = lines_of("log.get_logger('x').info('said', reason='y' * 100_000)")
    assert line["reason"].endswith("(100000 characters)")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["/dev/full", "a pipe that nobody reads"])
def test_blocked_stderr_does_not_delay_exit(target: str) -> None:
    """The lines exceed the 64 KiB that the pipe holds."""
    code = (
        START
        + "for _ in range(20_000): log.get_logger('x').info('said', what='y' * 100)\n"
        + "print(log.get_dropped_lines() > 0)"
    )
    if target == "/dev/full":
        with open(target, "wb") as full:
            done = subprocess.run(
                [sys.executable, "-c", code + "\nlog.flush_log(); print(log.get_dropped_lines())"],
                stdout=subprocess.PIPE,
                stderr=full,
                timeout=60,
                check=True,
            )
        assert done.stdout.split()[-1] == b"20000"
        return
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stdout.read() == b"True\n"


def test_hung_stop_dumps_stacks_and_exits() -> None:
    code = START + (
        "import signal, time\n"
        "def stands_still(): time.sleep(600)\n"
        "async def main(stop):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    await stop.wait()\n"
        "    stands_still()\n"
        "runtime.run_event_loop(main, longest_stop=0.2)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "stands_still" in done.stderr
