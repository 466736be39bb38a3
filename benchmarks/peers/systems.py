"""The servers that are compared: running ones, and clusters of Baton for their turns.

While one system has its turn, no other one uses the CPUs: running servers are paused between their
turns, because some spin while they are idle, and clusters run only for their turns.
"""

import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from rich.console import Console

from baton.config.resolve import parse_assignment, resolve_config
from benchmarks.clusters.local_cluster import serve_model_folder
from benchmarks.load.http_stream import parse_url
from benchmarks.peers.processes import find_listener, pause, resume

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_SPLIT = re.compile(r"(\d+)p(\d+)d")
COLOCATED, AUTO = "colocated", "auto"


@dataclass(frozen=True, slots=True)
class RunningSystem:
    """A server that has its turn."""

    url: str
    roots: tuple[int, ...]  # pids of its processes; their descendants belong to it too


class PeerSystem(Protocol):
    """A server under comparison."""

    @property
    def name(self) -> str: ...

    def run_exclusively(self) -> AbstractAsyncContextManager[RunningSystem]:
        """Run the server, alone on this machine, for the time of the context."""
        ...


@dataclass(frozen=True, slots=True)
class AttachedServer:
    """A server that the user has started; paused between its turns."""

    name: str
    url: str
    roots: tuple[int, ...]  # empty for a server on another machine

    @asynccontextmanager
    async def run_exclusively(self) -> AsyncIterator[RunningSystem]:
        resume(self.roots)
        try:
            yield RunningSystem(self.url, self.roots)
        finally:
            pause(self.roots)

    def close(self) -> None:
        """Leave the server running, as it was found."""
        resume(self.roots)


def attach_server(name: str, url: str) -> AttachedServer:
    """Find the processes of a running server and pause it until its first turn.

    Raises ValueError if nothing listens there.
    """
    target = parse_url(url)
    if target.host not in _LOOPBACK:
        return AttachedServer(name, url, ())
    listener = find_listener(target.port)
    if listener is None:
        raise ValueError(f"--server {name}={url}: no process that can be seen listens there")
    pause((listener,))
    return AttachedServer(name, url, (listener,))


@dataclass(slots=True)
class BatonSystem:
    """Clusters of Baton with the same settings, one for each turn."""

    name: str
    console: Console
    folder: Path
    settings: Mapping[str, Any]
    start_seconds: list[float] = field(default_factory=list)  # until it serves, for each turn

    @asynccontextmanager
    async def run_exclusively(self) -> AsyncIterator[RunningSystem]:
        started = perf_counter()
        async with serve_model_folder(self.console, self.folder, **self.settings) as cluster:
            self.start_seconds.append(perf_counter() - started)
            roots = tuple(cluster.get_pids().values())
            yield RunningSystem(f"http://{cluster.endpoints.http}", roots)


def plan_baton(text: str, console: Console, folder: Path, load_format: str) -> BatonSystem:
    """Parse `[NAME=]LAYOUT[,setting=value...]`. Raises ValueError or ConfigError.

    LAYOUT is colocated, auto, or prefill and decode nodes such as 1p1d.
    """
    layout, *words = text.split(",")
    name, _, layout = layout.rpartition("=")
    own: dict[str, object] = dict(map(parse_assignment, words))
    given = _layout_settings(layout) | {"load_format": load_format} | own
    config = resolve_config(given, environ={})
    values = [str(value) for value in own.values()]
    settings = {key: getattr(config, key) for key in given}
    return BatonSystem(name or "-".join(["baton", layout, *values]), console, folder, settings)


def _layout_settings(layout: str) -> dict[str, object]:
    if layout == COLOCATED:
        return {"mode": "colocated", "prefill": 0, "decode": 1}
    if layout == AUTO:
        return {"mode": "auto", "prefill": 1, "decode": 1}
    if found := _SPLIT.fullmatch(layout):
        prefill, decode = map(int, found.groups())
        return {"mode": "disaggregated", "prefill": prefill, "decode": decode}
    raise ValueError(f"--baton {layout!r} is none of {COLOCATED}, {AUTO} and 1p1d")


def parse_servers(words: Sequence[str]) -> dict[str, str]:
    """Return URLs by name from NAME=URL words. Raises ValueError."""
    found: dict[str, str] = {}
    for word in words:
        name, _, url = word.partition("=")
        if not name or not url or name in found:
            raise ValueError(f"--server {word!r} is not NAME=URL with a name of its own")
        found[name] = url
    return found


@contextlib.contextmanager
def attach_servers(urls: Mapping[str, str]) -> Iterator[list[AttachedServer]]:
    """Yield the running servers, paused; they run again afterwards, whatever happens."""
    with contextlib.ExitStack() as stack:
        servers = []
        for name, url in urls.items():
            server = attach_server(name, url)
            stack.callback(server.close)
            servers.append(server)
        yield servers
