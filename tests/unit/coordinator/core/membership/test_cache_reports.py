"""What nodes tell of their caches, from the node's journal to the coordinator's directory, over the
wire."""

import pytest

from baton.cluster_link.messages import (
    CacheEvents,
    CacheSnapshot,
    CacheSnapshotRequest,
    DecodeStarted,
    LedgerReport,
    NodeReport,
    PrefillEnded,
)
from baton.cluster_link.order_codec import decode_order, encode_order
from baton.cluster_link.report_codec import decode_report, encode_report
from baton.cluster_link.stream import decode_checked, encode_checked
from baton.kv.blocks import BlockHash, short_hash
from baton.kv.cache_journal import CacheJournal
from baton.pb import cluster_pb2 as pb
from baton.types import NodeName
from coordinator.core.membership.prefix_directory import SNAPSHOT_TIMEOUT_SECONDS
from node_engine.roles.coordinator_reporter import CoordinatorReporter
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness

NAMES = [BlockHash(bytes([255 - number]) * 32) for number in range(4)]
SHORT = [short_hash(name) for name in NAMES]


def decode_reports(sent: list[pb.NodeMessage]) -> list[NodeReport | LedgerReport | None]:
    """As the coordinator reads them."""
    read = [decode_checked(pb.NodeMessage, encode_checked(message)) for message in sent]
    return [decode_report(message) for message in read if message is not None]


def test_cache_journal_wire_round_trip() -> None:
    sent: list[pb.NodeMessage] = []
    journal = CacheJournal()
    report = CoordinatorReporter(NodeName("n"), lambda *report: sent.append(encode_report(*report)))
    report.report_cache_changes(journal.build_snapshot(NAMES[:2], 0.0))
    journal.record_insertion(NAMES[2])
    journal.record_eviction(NAMES[0])
    report.report_cache_changes(journal.pop_events(1.0))
    assert decode_reports(sent) == [
        CacheSnapshot(1, (SHORT[0], SHORT[1])),
        CacheEvents(2, (SHORT[2],), (SHORT[0],)),
    ]


def test_snapshot_order_on_the_wire() -> None:
    sealed = encode_checked(encode_order(CacheSnapshotRequest()))
    message = decode_checked(pb.CoordinatorMessage, sealed)
    assert message is not None
    assert decode_order(message) == CacheSnapshotRequest()


@pytest.mark.parametrize("kind", ["prefill_ended", "admitted"])
def test_compute_seconds_on_the_wire(kind: str) -> None:
    message = pb.NodeMessage()
    getattr(message, kind).share_seconds = 0.25
    (read,) = decode_reports([message])
    assert isinstance(read, PrefillEnded | DecodeStarted)
    assert read.compute_seconds == 0.25


def test_event_gap_triggers_snapshot_then_prefix_placement() -> None:
    world = BrainHarness()
    world.join_node("p0", PREFILL)
    p1, d0 = world.join_node("p1", PREFILL), world.join_node("d0", DECODE)
    world.send_from_node(p1, CacheSnapshot(1, (1, 2)))
    world.send_from_node(p1, CacheEvents(3, (3,), ()))
    assert world.messages_to(p1, CacheSnapshotRequest) == [CacheSnapshotRequest()]
    world.now += SNAPSHOT_TIMEOUT_SECONDS
    world.send_from_node(p1, CacheEvents(4, (4,), ()))
    assert len(world.messages_to(p1, CacheSnapshotRequest)) == 2
    world.send_from_node(p1, CacheSnapshot(5, (1,)))
    directory = world.brain.placement_state.prefix_directory
    assert (len(directory), directory.resync_count) == (1, 2)
    world.lose_node(p1)
    assert len(directory) == 0
    world.send_from_node(d0, CacheSnapshot(1, ()))
    assert world.messages_to(d0, CacheSnapshotRequest) == []
