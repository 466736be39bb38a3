"""What nodes tell of their caches, from the node's journal to the coordinator's directory, over the wire."""

import pytest

from baton.block_hash import BlockHash, short_name
from baton.link_codec import seal, unseal
from baton.pb import cluster_pb2 as pb
from coordinator.core import messages as m
from coordinator.core.prefix_directory import PATIENCE
from coordinator.node_messages import input_from_pb, order_to_pb
from node_engine.core import messages
from node_engine.core.cache_journal import CacheJournal
from node_engine.host.coordinator_link import command_from_pb
from node_engine.reporter import Reporter
from tests.unit.coordinator_core.world import DECODE, PREFILL, World

NAMES = [BlockHash(bytes([255 - number]) * 32) for number in range(4)]
SHORT = [short_name(name) for name in NAMES]


def told(sent: list[pb.NodeMessage]) -> list[m.NodeInput | None]:
    """As the coordinator reads them."""
    read = [unseal(pb.NodeMessage, seal(message)) for message in sent]
    return [input_from_pb(message) for message in read if message is not None]


def test_a_journal_on_the_wire() -> None:
    sent: list[pb.NodeMessage] = []
    journal, report = CacheJournal(), Reporter("n", sent.append)
    report.cache(journal.take_snapshot(NAMES[:2], 0.0))
    journal.gained(NAMES[2])
    journal.lost(NAMES[0])
    report.cache(journal.take(1.0))
    assert told(sent) == [
        m.CacheSnapshot(1, (SHORT[0], SHORT[1])),
        m.CacheEvents(2, (SHORT[2],), (SHORT[0],)),
    ]


def test_a_query_on_the_wire() -> None:
    sealed = seal(order_to_pb(m.CacheQuery()))
    message = unseal(pb.CoordinatorMessage, sealed)
    assert message is not None
    assert command_from_pb(message) == messages.CacheQuery()


@pytest.mark.parametrize("kind", ["prefill_ended", "admitted"])
def test_seconds_of_a_prompt_on_the_wire(kind: str) -> None:
    message = pb.NodeMessage()
    getattr(message, kind).share_seconds = 0.25
    (read,) = told([message])
    assert isinstance(read, m.PrefillEnded | m.Admitted)
    assert read.share_seconds == 0.25


def test_a_gap_makes_the_brain_ask_and_prompts_go_to_who_holds_them() -> None:
    world = World()
    world.join("p0", PREFILL)
    p1, d0 = world.join("p1", PREFILL), world.join("d0", DECODE)
    world.say(p1, m.CacheSnapshot(1, (1, 2)))
    world.say(p1, m.CacheEvents(3, (3,), ()))
    assert world.sent(p1, m.CacheQuery) == [m.CacheQuery()]
    world.now += PATIENCE
    world.say(p1, m.CacheEvents(4, (4,), ()))
    assert len(world.sent(p1, m.CacheQuery)) == 2
    world.say(p1, m.CacheSnapshot(5, (1,)))
    directory = world.brain.knowledge.directory
    assert (len(directory), directory.resyncs) == (1, 2)
    world.gone(p1)
    assert len(directory) == 0
    world.say(d0, m.CacheSnapshot(1, ()))
    assert world.sent(d0, m.CacheQuery) == []
