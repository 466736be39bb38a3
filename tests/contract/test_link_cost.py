"""Every transport learns what its link takes from the hand-offs themselves, and layers that are
announced together travel together."""

from pathlib import Path

import pytest

from baton.types import BlockIndex
from kv_transfer.plane import LinkCost, SealInfo
from tests.contract.transfer_pair import LAYOUT, TransferPair, transfer_pair


@pytest.mark.parametrize("num_layers", [1, LAYOUT.num_layers], ids=["by layer", "whole"])
def test_layers_announced_together_are_one_message(
    backend: str, num_layers: int, tmp_path: Path
) -> None:
    with transfer_pair(backend, tmp_path) as pair:
        hand_over(pair, num_layers)
        assert pair.outbound.counters()["messages_written"] == LAYOUT.num_layers // num_layers


def test_link_cost_is_learned(pair: TransferPair) -> None:
    assert pair.outbound.link_cost == LinkCost(max_payload_bytes=pair.settings.max_payload_bytes)
    hand_over(pair, 1)
    learned = pair.outbound.link_cost
    assert learned != LinkCost(max_payload_bytes=pair.settings.max_payload_bytes)
    assert learned.transfer_seconds(1, LAYOUT.slab_bytes) > 0.0


def hand_over(pair: TransferPair, num_layers: int) -> None:
    """Two blocks, `num_layers` layers at once, each group when the one before has landed."""
    source, target = [1, 2], [4, 5]
    key = pair.open_handoff(2)
    ticket = pair.grant_ticket(key, target)
    pair.outbound.set_ticket(key, ticket)
    for layer in range(0, LAYOUT.num_layers, num_layers):
        blocks = [BlockIndex(block) for block in source]
        pair.outbound.announce_layer(key, layer, 0, blocks, num_layers)
        assert pair.outbound.wait_for_layer(key, layer, timeout=30)
    pair.outbound.seal_handoff(key, SealInfo((1,)))
    pair.finish_handoff(ticket)
    assert pair.has_arrived(source, target)
