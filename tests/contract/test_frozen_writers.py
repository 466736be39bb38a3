"""A one-sided writer in a process of its own, stopped or killed in the middle of a write.

Over cuda_ipc the kernel releases the fence byte of a writer that dies in a write, and its blocks
are free only with the proof that its process has ended."""

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

from baton.errors import Cancelled, LeaseExpired, PeerUnreachable
from baton.types import Ticket
from kv_transfer.plane import InboundFenced, InboundSealed
from tests.contract.transfer_pair import (
    LAYOUT,
    ONE_SIDED,
    POISON_BYTE,
    TransferPair,
    transfer_pair,
    wait_until,
)
from tests.contract.writer_process import WriterOrder, make_source_arena

ROOT = Path(__file__).resolve().parents[2]
SOURCE_BLOCKS, TARGET_BLOCKS, SEED = (5, 0, 3), [10, 20, 30], 3
IN_A_WRITE = "transfer.write.before"


class WriterProcess:
    """A writer process that has imported everything and waits for its order."""

    def __init__(self, pair: TransferPair, failpoints: str) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.contract.writer_process",
                str(pair.folder),
                pair.writer_incarnation,
                str(SEED),
                pair.backend,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *sys.path]),
                "BATON_FAILPOINTS": failpoints,
            },
        )
        assert self.read_line() == "ready"

    def send_order(self, ticket: Ticket) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(
            msgspec.json.encode(WriterOrder(ticket, SOURCE_BLOCKS)).decode() + "\n"
        )
        self.process.stdin.flush()

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def wait_until_stopped(self) -> None:
        """Wait until the process has stopped itself."""
        found, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert (found, os.WIFSTOPPED(status)) == (self.process.pid, True)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def writer_process(pair: TransferPair, failpoints: str = "") -> Iterator[WriterProcess]:
    writer = WriterProcess(pair, failpoints)
    try:
        yield writer
    finally:
        writer.process.kill()
        writer.process.communicate()


@pytest.fixture(params=ONE_SIDED)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TransferPair]:
    """Over cuda_ipc, device memory is the host's: what a GPU does after a kill is not seen here."""
    with transfer_pair(request.param, tmp_path) as opened:
        yield opened
        assert opened.decode_events.drain_unexpected() == []


def check_stays_quarantined(pair: TransferPair) -> None:
    retries = pair.inbound.counters().get("fence_retries", 0)
    wait_until(lambda: pair.inbound.counters().get("fence_retries", 0) >= retries + 5)
    assert pair.decode_events.drain_unexpected() == []


def expected_blocks() -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    arena = make_source_arena(SEED).reshape(-1, LAYOUT.num_layers, LAYOUT.slab_bytes)
    return arena[list(SOURCE_BLOCKS)]


def test_handoff_from_another_process(pair: TransferPair) -> None:
    with writer_process(pair) as writer:
        ticket = pair.grant_ticket(pair.new_key(), TARGET_BLOCKS)
        writer.send_order(ticket)
        assert pair.decode_events.expect_event(InboundSealed).ticket_id == ticket.id
        assert np.array_equal(pair.decode_arena[TARGET_BLOCKS], expected_blocks())
        pair.inbound.commit_ticket(ticket.id)
        assert writer.read_line() == "committed"


@pytest.fixture
def frozen(pair: TransferPair) -> Iterator[WriterProcess]:
    """A writer that stops itself in the middle of its first write."""
    with writer_process(pair, f"{IN_A_WRITE}=stop*1") as writer:
        yield writer


def test_a_writer_frozen_in_a_write_keeps_its_blocks_until_it_is_killed(
    pair: TransferPair, frozen: WriterProcess
) -> None:
    ticket = pair.grant_ticket(pair.new_key(), TARGET_BLOCKS)
    frozen.send_order(ticket)
    frozen.wait_until_stopped()
    pair.inbound.revoke_ticket(ticket.id, Cancelled("the client left"))
    pair.expect_lost(ticket, Cancelled, fenced=False)
    check_stays_quarantined(pair)
    frozen.kill()
    assert pair.decode_events.expect_event(InboundFenced) == InboundFenced(ticket.id)
    assert pair.is_untouched(TARGET_BLOCKS)
    pair.check_full_handoff()


def test_a_writer_frozen_in_a_write_loses_its_lease_but_not_its_blocks(
    pair: TransferPair, frozen: WriterProcess
) -> None:
    ticket = pair.grant_ticket(pair.new_key(), TARGET_BLOCKS, ttl=2.0)
    frozen.send_order(ticket)
    frozen.wait_until_stopped()
    pair.expect_lost(ticket, LeaseExpired, fenced=False)
    check_stays_quarantined(pair)
    frozen.kill()
    assert pair.decode_events.expect_event(InboundFenced) == InboundFenced(ticket.id)


def test_a_writer_that_thaws_ends_its_write_in_quarantine_and_hears_that_it_is_over(
    pair: TransferPair, frozen: WriterProcess
) -> None:
    """It may complete its write into quarantined blocks. Then it unlocks its fence byte."""
    ticket = pair.grant_ticket(pair.new_key(), TARGET_BLOCKS)
    frozen.send_order(ticket)
    frozen.wait_until_stopped()
    pair.inbound.revoke_ticket(ticket.id, Cancelled("the client left"))
    pair.expect_lost(ticket, Cancelled, fenced=False)
    pair.check_full_handoff()  # in other blocks, meanwhile
    frozen.resume()
    assert pair.decode_events.expect_event(InboundFenced) == InboundFenced(ticket.id)
    assert frozen.read_line() == "aborted cancelled"
    assert not pair.is_untouched(TARGET_BLOCKS)


def test_a_writer_frozen_between_two_writes_holds_nothing(pair: TransferPair) -> None:
    """Its blocks are free at once. When it runs again, it is fenced off before it writes a byte."""
    with writer_process(pair, "transfer.seal.before=stop*1") as writer:
        ticket = pair.grant_ticket(pair.new_key(), TARGET_BLOCKS)
        writer.send_order(ticket)
        writer.wait_until_stopped()
        pair.inbound.revoke_ticket(ticket.id, Cancelled("the client left"))
        pair.expect_lost(ticket, Cancelled)
        pair.decode_arena[TARGET_BLOCKS] = POISON_BYTE
        writer.resume()
        assert writer.read_line().startswith("aborted ")
        assert pair.is_untouched(TARGET_BLOCKS)
        pair.check_full_handoff()


@pytest.mark.parametrize("where", [IN_A_WRITE, "transfer.write.after", "transfer.seal.before"])
def test_a_writer_that_dies_leaves_blocks_that_are_free_at_once(
    pair: TransferPair, where: str
) -> None:
    with writer_process(pair, f"{where}=exit") as writer:
        ticket = pair.grant_ticket(pair.new_key(), TARGET_BLOCKS, ttl=1000.0)
        writer.send_order(ticket)
        writer.process.wait()
        pair.inbound.on_peer_gone(ticket.writer_incarnation)
        pair.expect_lost(ticket, PeerUnreachable)
    pair.check_full_handoff()


def test_a_writer_that_comes_late_cannot_write(pair: TransferPair) -> None:
    with writer_process(pair) as writer:
        ticket = pair.grant_ticket(pair.new_key(), TARGET_BLOCKS)
        pair.inbound.revoke_ticket(ticket.id, Cancelled("the client left"))
        pair.expect_lost(ticket, Cancelled)
        writer.send_order(ticket)
        assert writer.read_line() in ("aborted stale", "aborted cancelled")
        assert pair.is_untouched(TARGET_BLOCKS)
