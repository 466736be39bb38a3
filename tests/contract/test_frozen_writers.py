"""A one-sided writer in a process of its own, stopped or killed in the middle of a write."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.errors import Cancelled, LeaseExpired, PeerGone
from baton.types import Ticket
from kv_transfer.plane import Fenced, Sealed
from tests.contract.rig import LAYOUT, POISON, Rig, eventually, rig
from tests.contract.writer_process import Order, source_arena

ROOT = Path(__file__).resolve().parents[2]
SOURCE, TARGET, SEED = (5, 0, 3), [10, 20, 30], 3
IN_A_WRITE = "transfer.write.before"


class WriterProcess:
    """Ready to write: everything is imported, and it waits for its order."""

    def __init__(self, pair: Rig, failpoints: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.writer_process", str(pair.folder), pair.writer, str(SEED)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "BATON_FAILPOINTS": failpoints},
        )
        assert self.hear() == "ready"

    def begin(self, ticket: Ticket) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(Order(ticket, SOURCE)).decode() + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def stopped(self) -> None:
        """Wait until the process has stopped itself."""
        found, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert (found, os.WIFSTOPPED(status)) == (self.process.pid, True)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def writer_process(pair: Rig, failpoints: str = "") -> Iterator[WriterProcess]:
    writer = WriterProcess(pair, failpoints)
    try:
        yield writer
    finally:
        writer.process.kill()
        writer.process.communicate()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Rig]:
    with rig("shm", tmp_path) as made:
        yield made
        assert made.decode_events.rest() == []


def nothing_frees_it(pair: Rig) -> None:
    retries = pair.inbound.counters().get("fence_retries", 0)
    eventually(lambda: pair.inbound.counters().get("fence_retries", 0) >= retries + 5)
    assert pair.decode_events.rest() == []


def expected() -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    arena = source_arena(SEED).reshape(-1, LAYOUT.num_layers, LAYOUT.slab_bytes)
    return arena[list(SOURCE)]


def test_another_process_hands_off(pair: Rig) -> None:
    with writer_process(pair) as writer:
        ticket = pair.granted(pair.key(), TARGET)
        writer.begin(ticket)
        assert pair.decode_events.expect(Sealed).ticket == ticket.id
        assert np.array_equal(pair.target[TARGET], expected())
        pair.inbound.commit(ticket.id)
        assert writer.hear() == "committed"


@pytest.fixture
def frozen(pair: Rig) -> Iterator[WriterProcess]:
    """Will stop itself in the middle of its first write."""
    with writer_process(pair, f"{IN_A_WRITE}=stop*1") as writer:
        yield writer


def test_a_writer_frozen_in_a_write_keeps_its_blocks_until_it_is_killed(pair: Rig, frozen: WriterProcess) -> None:
    ticket = pair.granted(pair.key(), TARGET)
    frozen.begin(ticket)
    frozen.stopped()
    pair.inbound.revoke(ticket.id, Cancelled("the client left"))
    pair.lost(ticket, Cancelled, fenced=False)
    nothing_frees_it(pair)
    frozen.kill()
    assert pair.decode_events.expect(Fenced) == Fenced(ticket.id)
    assert pair.untouched(TARGET)
    pair.works()


def test_a_writer_frozen_in_a_write_loses_its_lease_but_not_its_blocks(pair: Rig, frozen: WriterProcess) -> None:
    ticket = pair.granted(pair.key(), TARGET, ttl=2.0)
    frozen.begin(ticket)
    frozen.stopped()
    pair.lost(ticket, LeaseExpired, fenced=False)
    nothing_frees_it(pair)
    frozen.kill()
    assert pair.decode_events.expect(Fenced) == Fenced(ticket.id)


def test_a_writer_that_thaws_ends_its_write_in_quarantine_and_hears_that_it_is_over(
    pair: Rig, frozen: WriterProcess
) -> None:
    """It may complete the write that it was in: the blocks are still nobody else's. Then it lets go."""
    ticket = pair.granted(pair.key(), TARGET)
    frozen.begin(ticket)
    frozen.stopped()
    pair.inbound.revoke(ticket.id, Cancelled("the client left"))
    pair.lost(ticket, Cancelled, fenced=False)
    pair.works()  # in other blocks, meanwhile
    frozen.thaw()
    assert pair.decode_events.expect(Fenced) == Fenced(ticket.id)
    assert frozen.hear() == "aborted cancelled"
    assert not pair.untouched(TARGET)


def test_a_writer_frozen_between_two_writes_holds_nothing(pair: Rig) -> None:
    """Its blocks are free at once; thawed, it finds itself shut out before it has written another byte."""
    with writer_process(pair, "transfer.seal.before=stop*1") as writer:
        ticket = pair.granted(pair.key(), TARGET)
        writer.begin(ticket)
        writer.stopped()
        pair.inbound.revoke(ticket.id, Cancelled("the client left"))
        pair.lost(ticket, Cancelled)
        pair.target[TARGET] = POISON
        writer.thaw()
        assert writer.hear().startswith("aborted ")
        assert pair.untouched(TARGET)
        pair.works()


@pytest.mark.parametrize("where", [IN_A_WRITE, "transfer.write.after", "transfer.seal.before"])
def test_a_writer_that_dies_leaves_blocks_that_are_free_at_once(pair: Rig, where: str) -> None:
    with writer_process(pair, f"{where}=exit") as writer:
        ticket = pair.granted(pair.key(), TARGET, ttl=1000.0)
        writer.begin(ticket)
        writer.process.wait()
        pair.inbound.peer_gone(ticket.writer)
        pair.lost(ticket, PeerGone)
    pair.works()


def test_a_writer_that_comes_late_cannot_write(pair: Rig) -> None:
    with writer_process(pair) as writer:
        ticket = pair.granted(pair.key(), TARGET)
        pair.inbound.revoke(ticket.id, Cancelled("the client left"))
        pair.lost(ticket, Cancelled)
        writer.begin(ticket)
        assert writer.hear() in ("aborted stale", "aborted cancelled")
        assert pair.untouched(TARGET)
