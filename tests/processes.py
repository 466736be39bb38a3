"""Looking at processes by pid, for tests: whose they are, and when they end."""

import asyncio
import ipaddress
import os
import select
import struct
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path

_LISTEN = "0A"  # a state in /proc/net/tcp


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


def list_listening_addresses(pids: set[int]) -> set[tuple[str, int]]:
    """Every TCP address at which one of the processes listens, as the kernel knows it."""
    inodes = {inode for pid in pids for inode in _list_sockets(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add((_parse_kernel_address(address), int(port, 16)))
    return found


def _parse_kernel_address(address: str) -> str:
    """Parse the kernel's hexadecimal words, each in the machine's byte order. An IPv4-mapped
    address becomes IPv4."""
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    parsed = ipaddress.ip_address(packed)
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def _list_sockets(pid: int) -> set[str]:
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found
