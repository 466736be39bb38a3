"""`bench serve` with servers beside each other: turns, pauses, and repeated cells."""

import io
import os
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from baton.errors import ConfigError
from benchmarks import serve
from benchmarks.__main__ import make_parser
from benchmarks.peers import command, processes, rounds, systems
from benchmarks.peers.cells import CellFigures, parse_cells
from benchmarks.peers.processes import OtherProcessLoad, find_listener, list_tree
from benchmarks.peers.systems import attach_servers, parse_servers, plan_baton

CONSOLE = Console(file=io.StringIO())


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    """The URL and the pid of a token server."""
    command = [sys.executable, "-m", "tests.unit.benchmarks.peers.token_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}", process.pid
        process.kill()


class FakeMemoryReader:
    """A MemoryReader that allocates nothing and always measures 30 GB/s."""

    def __init__(self, threads: int, total_bytes: int) -> None:
        assert min(threads, total_bytes) > 0

    def measure_bandwidth(self) -> float:
        return 30e9


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MemoryReader", FakeMemoryReader)


def read_spread(note: str) -> list[float]:
    """The least and the greatest value in the note of a row."""
    words = note.partition(", ")[2].partition(";")[0].split(" to ")
    return [float(word.replace(",", "")) for word in words]


def parse(*words: str) -> Namespace:
    return make_parser({"serve": serve}).parse_args(["serve", *words])


def wait_for_pause(pid: int) -> None:
    """Return when a child has been stopped by a signal since the last call."""
    os.waitid(os.P_PID, pid, os.WSTOPPED)


def wait_for_continuation(pid: int) -> None:
    """Return when a stopped child has been continued since the last call."""
    os.waitid(os.P_PID, pid, os.WCONTINUED)


def test_a_slice_of_the_comparison(server: tuple[str, int]) -> None:
    """Two names of one server, in two rounds of two cells."""
    url, pid = server
    words = [f"--server={name}={url}" for name in ("one", "other")]
    words += ["--cells=chat:1,2", "--rounds=2", "--quiet=0", "--attempts=1", "--of=other"]
    rows = {row.name: row for row in serve.main(parse(*words), CONSOLE, "some command")}
    for name in ("one", "other"):
        for cell in ("chat_c1", "chat_c2"):
            for figure in ("ttft", "tpot", "longest_gap", "tokens"):
                assert rows[f"serve/{name}/{cell}/{figure}"].value > 0
                assert rows[f"serve/{name}/{cell}/{figure}"].note.startswith("2 rounds, ")
    for figure in ("ttft", "tpot", "longest_gap", "tokens"):
        ratio = rows[f"serve/one/chat_c2/{figure}_of_other"].value
        parts = [rows[f"serve/{name}/chat_c2/{figure}"].note for name in ("one", "other")]
        (low, high), (other_low, other_high) = map(read_spread, parts)
        assert low / other_high * 0.99 <= ratio <= high / other_low * 1.01
    assert not [name for name in rows if name.endswith("_of_one")]
    wait_for_continuation(pid)  # it runs again when all is over


async def test_turns_of_a_cell_follow_each_other(
    server: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server begins each round. A round without figures does not move later ones."""
    turns: list[tuple[str, str, int]] = []

    async def record_turn(
        self: rounds.PeerRounds, name: str, running: Any, cell: Any, number: int
    ) -> None:
        turns.append((name, cell.name, number))
        if (name, number) != ("other", 0):
            self._figures[name, cell][number] = CellFigures(1.0, 1.0, 1.0, 1.0, Counter())

    monkeypatch.setattr(rounds.PeerRounds, "_measure_turn", record_turn)
    cells = parse_cells("chat:1,2")
    settings = rounds.RoundSettings(2, 0.1, 1, 0.0, 9.0, 9.0, 500, "seed")
    memory: Any = FakeMemoryReader(1, 1)
    peer_rounds = rounds.PeerRounds(settings, cells, CONSOLE, memory)
    with attach_servers(dict.fromkeys(("one", "other"), server[0])) as systems_found:
        await peer_rounds.measure_all(systems_found)
    assert turns == [
        *(("one", "chat_c1", 0), ("other", "chat_c1", 0)),
        *(("one", "chat_c2", 0), ("other", "chat_c2", 0)),
        *(("other", "chat_c1", 1), ("one", "chat_c1", 1)),
        *(("other", "chat_c2", 1), ("one", "chat_c2", 1)),
    ]
    collected = peer_rounds.collect()
    assert {name: list(found[cells[0]].rounds) for name, found in collected.items()} == {
        "one": [0, 1],
        "other": [1],
    }


def test_a_line_has_the_state_of_the_machine() -> None:
    state = rounds.MachineState(0.034, [30e9, 42e9, 50e9])
    assert str(state) == "others used 0.03 cores, memory 42 GB/s"
    assert str(rounds.MachineState(0.2, [])) == "others used 0.20 cores"


def test_memory_is_read_while_the_server_is_stopped(
    server: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0

    def read_memory(reader: FakeMemoryReader) -> float:
        nonlocal reads
        if reads % 3 == 0:  # the first pass of three
            wait_for_pause(server[1])
        reads += 1
        return 30e9

    monkeypatch.setattr(FakeMemoryReader, "measure_bandwidth", read_memory)
    monkeypatch.setattr(systems, "pause", lambda roots: None)  # only for this measurement
    words = [f"--server=peer={server[0]}", "--cells=chat:1", "--rounds=1", "--quiet=0"]
    rows = serve.main(parse(*words, "--attempts=1"), CONSOLE, "some command")
    assert rows[0].value > 0, "it answered, so that it ran again after the first passes"
    assert reads == 6


async def test_a_server_is_paused_between_its_turns(server: tuple[str, int]) -> None:
    url, pid = server
    with attach_servers({"peer": url}) as (peer,):
        wait_for_pause(pid)
        async with peer.run_exclusively() as running:
            wait_for_continuation(pid)
            assert running.roots == (pid,)
        wait_for_pause(pid)
    wait_for_continuation(pid)


def test_the_listener_of_a_port_is_found_with_its_ancestors(server: tuple[str, int]) -> None:
    url, pid = server
    assert find_listener(int(url.rpartition(":")[2])) == pid
    assert find_listener(1) is None
    assert list_tree(os.getpid())[0] == os.getpid()
    assert pid in list_tree(os.getpid())


def test_only_unknown_processes_are_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine was busy for 4 s in 2 s, of which known processes used 1 s."""
    busy, used, now = iter([100.0, 104.0]), iter([10.0, 11.0]), iter([50.0, 52.0])
    monkeypatch.setattr(processes, "_read_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(processes, "cpu_seconds", lambda pid: next(used))
    monkeypatch.setattr(processes, "list_tree", lambda root: [7])
    monkeypatch.setattr("benchmarks.peers.processes.perf_counter", lambda: next(now))
    assert OtherProcessLoad([7]).measure_cores() == pytest.approx(1.5)


@pytest.mark.parametrize(("loads", "kept"), [([0.9, 0.05], 0), ([0.9, 0.9, 0.9], 1)])
def test_a_disturbed_cell_is_repeated(
    server: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
    loads: list[float],
    kept: int,
) -> None:
    """Attempts end with the first one that is not disturbed; the last one counts in any case."""
    left = list(loads)

    class Scripted(OtherProcessLoad):
        def measure_cores(self) -> float:
            return left.pop(0)

    monkeypatch.setattr(rounds, "OtherProcessLoad", Scripted)
    words = [f"--server=peer={server[0]}", "--cells=chat:1", "--rounds=1", "--quiet=0"]
    rows = serve.main(parse(*words), CONSOLE, "some command")
    assert left == []
    assert ("1 of them disturbed" in rows[0].note) == bool(kept)


async def test_a_cluster_runs_for_its_turn_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    running: list[dict[str, Any]] = []

    @asynccontextmanager
    async def serve_folder(
        console: Console, folder: Path, **settings: Any
    ) -> AsyncIterator[SimpleNamespace]:
        running.append(settings)
        endpoints = SimpleNamespace(http="127.0.0.1:80")
        yield SimpleNamespace(endpoints=endpoints, get_pids=lambda: {"node": 5})
        running.pop()

    monkeypatch.setattr(systems, "serve_model_folder", serve_folder)
    cluster = plan_baton("auto,max_num_seqs=32", CONSOLE, tmp_path, "dummy")
    assert cluster.name == "baton-auto-32"
    async with cluster.run_exclusively() as turn:
        assert turn == systems.RunningSystem("http://127.0.0.1:80", (5,))
        assert running == [
            {
                "mode": "auto",
                "prefill": 1,
                "decode": 1,
                "load_format": "dummy",
                "max_num_seqs": 32,
            }
        ]
    assert running == []
    assert len(cluster.start_seconds) == 1


@pytest.mark.parametrize(
    ("text", "name", "settings"),
    [
        ("colocated", "baton-colocated", {"mode": "colocated", "prefill": 0, "decode": 1}),
        ("1p2d", "baton-1p2d", {"mode": "disaggregated", "prefill": 1, "decode": 2}),
        ("ours=auto", "ours", {"mode": "auto", "prefill": 1, "decode": 1}),
        ("colocated,threads=2", "baton-colocated-2", {"decode": 1, "threads": "2"}),
    ],
)
def test_layouts_of_clusters(
    text: str, name: str, settings: dict[str, object], tmp_path: Path
) -> None:
    found = plan_baton(text, CONSOLE, tmp_path, "auto")
    assert found.name == name
    assert settings.items() <= found.settings.items()


@pytest.mark.parametrize("text", ["", "2d", "apart", "colocated,threads", "colocated,speed=9"])
def test_malformed_layouts_are_rejected(text: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, ConfigError)):
        plan_baton(text, CONSOLE, tmp_path, "auto")


@pytest.mark.parametrize("words", [["http://x"], ["a="], ["a=http://x", "a=http://y"]])
def test_malformed_servers_are_rejected(words: list[str]) -> None:
    with pytest.raises(ValueError, match="NAME=URL"):
        parse_servers(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds=0"], "--rounds"),
        (["--attempts=0"], "--attempts"),
        (["--cells=poem:1"], "--cells 'poem:1'"),
        (["--of=nobody"], "--of be one of baton-colocated"),
        (["--baton=colocated"], "names must differ"),
        (["--server=gone=http://127.0.0.1:1"], "no process that can be seen listens there"),
    ],
)
def test_malformed_comparisons_are_rejected(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve.main(parse("--baton=colocated", *words), CONSOLE, "command")
