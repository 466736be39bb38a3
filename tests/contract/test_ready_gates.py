"""Layers that are announced while a device computes them, behind gates.

Device memory is the host's here.
"""

import queue
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import Cancelled
from baton.process.clock import monotonic_clock
from baton.types import AttemptKey, BlockIndex
from kv_transfer.device.host_memory import HostMemory
from kv_transfer.plane import ReadyGate
from tests.contract.transfer_pair import (
    FAST_SETTINGS,
    SEAL_INFO,
    TIMEOUT_SECONDS,
    TransferPair,
    transfer_pair,
    wait_until,
)

BLOCKS = [3, 4]


class ComputedLater:
    """A DeviceEvent that passes when the test says so."""

    def __init__(self) -> None:
        self._passed = threading.Event()

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        assert self._passed.wait(TIMEOUT_SECONDS)

    def let_pass(self) -> None:
        self._passed.set()


def announce_behind_gates(
    pair: TransferPair, key: AttemptKey, source: list[int]
) -> list[tuple[ComputedLater, ReadyGate]]:
    """Announce each layer before it is computed."""
    announced = []
    for layer in range(pair.layout.num_layers):
        event = ComputedLater()
        gate = ReadyGate({layer: event})
        blocks = [BlockIndex(block) for block in source]
        pair.outbound.announce_layer(key, layer, 0, blocks, gate=gate)
        announced.append((event, gate))
    return announced


@pytest.mark.parametrize(
    "transport", ["cuda_ipc", "shm", "zmq"], ids=["device", "mapped", "inline"]
)
def test_layers_announced_before_they_are_computed_are_read_afterwards(
    transport: str, tmp_path: Path
) -> None:
    with transfer_pair("cuda_ipc", tmp_path) as pair:
        pair.backend = transport
        source, final = [1, 2], pair.prefill_arena[[1, 2]].copy()
        pair.prefill_arena[source] = 0
        key = pair.open_handoff(len(source))
        ticket = pair.grant_ticket(key, BLOCKS)
        pair.outbound.set_ticket(key, ticket)
        announced = announce_behind_gates(pair, key, source)
        for layer, (event, gate) in enumerate(announced):
            assert not pair.outbound.wait_for_layer(key, layer, timeout=0.02)
            pair.prefill_arena[source, layer] = final[:, layer]
            event.let_pass()
            gate.mark_passed(monotonic_clock())
            assert pair.outbound.wait_for_layer(key, layer, timeout=TIMEOUT_SECONDS)
        pair.outbound.seal_handoff(key, SEAL_INFO)
        committed = pair.finish_handoff(ticket)
        assert pair.has_arrived(source, BLOCKS)
        assert committed.stats.slabs_landed_before_last_layer == 2 * len(source)
        assert committed.stats.exposed_seconds < 1.0


def test_decode_is_not_expected_to_answer_before_a_gate_has_passed(tmp_path: Path) -> None:
    """A step may take longer than decode may take for an answer."""
    settings = replace(FAST_SETTINGS, progress_timeout=0.2)
    with transfer_pair("cuda_ipc", tmp_path, settings=settings) as pair:
        key = pair.open_handoff(2)
        ticket = pair.grant_ticket(key, BLOCKS)
        pair.outbound.set_ticket(key, ticket)
        announced = announce_behind_gates(pair, key, [1, 2])
        with pytest.raises(queue.Empty):
            pair.prefill_events.get(timeout=0.6)
        for event, gate in announced:
            event.let_pass()
            gate.mark_passed(monotonic_clock())
        pair.outbound.seal_handoff(key, SEAL_INFO)
        pair.finish_handoff(ticket)
        assert pair.has_arrived([1, 2], BLOCKS)


def test_a_device_is_asked_again_once_a_gate_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the results of what was queued behind it."""
    asked: list[bool] = []
    monkeypatch.setattr(HostMemory, "pass_on_ends", lambda _, of_checks: asked.append(of_checks))
    with transfer_pair("cuda_ipc", tmp_path) as pair:
        key = pair.open_handoff(2)
        ticket = pair.grant_ticket(key, BLOCKS)
        pair.outbound.set_ticket(key, ticket)
        announced = announce_behind_gates(pair, key, [1, 2])
        wait_until(lambda: _num_device_writes(pair) == len(announced))
        for event, gate in announced:
            before = asked.count(False)
            gate.mark_passed(monotonic_clock())
            wait_until(lambda before=before: asked.count(False) > before)  # type: ignore[misc]
            event.let_pass()
        pair.outbound.seal_handoff(key, SEAL_INFO)
        pair.finish_handoff(ticket)


def test_a_hand_off_that_is_aborted_ends_after_what_waits_for_a_gate(tmp_path: Path) -> None:
    """Its source blocks are read until then."""
    with transfer_pair("cuda_ipc", tmp_path) as pair:
        key = pair.open_handoff(2)
        ticket = pair.grant_ticket(key, BLOCKS)
        pair.outbound.set_ticket(key, ticket)
        announced = announce_behind_gates(pair, key, [1, 2])
        wait_until(lambda: _num_device_writes(pair) == len(announced))
        pair.outbound.abort_handoff(key, Cancelled("the client left"))
        with pytest.raises(queue.Empty):
            pair.prefill_events.get(timeout=0.1)
        for event, _ in announced:
            event.let_pass()
        pair.expect_aborted(key, Cancelled)
        pair.expect_lost(ticket, Cancelled)
        pair.check_full_handoff()


def _num_device_writes(pair: TransferPair) -> int:
    writer = pair.outbound._loop._writers._device  # type: ignore[attr-defined]
    return int(writer.num_in_flight)
