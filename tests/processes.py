"""Looking at processes by pid, for tests: whose they are, and when they end."""

import asyncio
import os
import select
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path


def find_pids(variable: str, value: str) -> list[int]:
    """Every live process on this machine that was started with `variable` set to `value`."""
    return [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if read_environ(pid).get(variable) == value
    ]


def read_environ(pid: int) -> dict[str, str]:
    """What a process was started with; empty for one that has ended, waited for or not."""
    entries = _read_proc(pid, "environ").split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def read_module(pid: int) -> str:
    """What follows `-m` on its command line, "" if nothing does."""
    words = _read_proc(pid, "cmdline").split("\0")
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


def measure_private_bytes(pids: Mapping[str, int]) -> dict[str, int]:
    """Of each process, by name: what it has allocated itself, less the segments that it maps."""
    fields = {name: Path(f"/proc/{pid}/status").read_text() for name, pid in pids.items()}
    return {name: int(text.split("RssAnon:")[1].split()[0]) * 1024 for name, text in fields.items()}


def _read_proc(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_text(errors="replace")
    except OSError:
        return ""


def wait_for_exit(handle: int, timeout: float) -> bool:
    """Block until the process behind a pidfd has ended; False if it has not after `timeout`
    seconds. Closes it."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    try:
        return bool(poll.poll(timeout * 1000))
    finally:
        os.close(handle)


async def wait_first_exit(pids: Iterable[int]) -> int:
    """The first of these processes to end."""
    ends = {asyncio.create_task(_wait_exit(pid)): pid for pid in pids}
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return ends[done.pop()]
    finally:
        for task in ends:
            task.cancel()


async def await_unless_exit(awaited: Awaitable[None], pids: Iterable[int]) -> int | None:
    """Await something that needs these processes: None when it came to pass, else the pid that
    ended first."""
    wanted, ended = asyncio.ensure_future(awaited), asyncio.create_task(wait_first_exit(pids))
    try:
        await asyncio.wait({wanted, ended}, return_when=asyncio.FIRST_COMPLETED)
        if wanted.done():
            wanted.result()
            return None
        return ended.result()
    finally:
        wanted.cancel()
        ended.cancel()


async def _wait_exit(pid: int) -> None:
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop.add_reader(handle, _set_result, over)
    try:
        await over
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def _set_result(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
