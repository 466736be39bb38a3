"""A peer that ends takes only its own hand-offs along."""

from pathlib import Path

from baton.errors import PeerGone
from baton.types import BlockIndex, Incarnation
from kv_transfer.plane import Aborted, Committed, Lost, Sealed, SealInfo, Started
from tests.contract.rig import rig


def test_a_peer_that_is_gone_may_leave_several_hand_offs_in_one_arena(tmp_path: Path) -> None:
    """Its arena is let go when the last of them has dropped its lock; those of its next incarnation keep theirs."""
    with rig("shm", tmp_path) as pair:
        keys = [pair.key() for _ in range(3)]
        for block, key in enumerate(keys):
            pair.outbound.open(key, 8)
            ticket = pair.ticket(key, [2 * block, 2 * block + 1])
            pair.inbound.grant(ticket)
            pair.outbound.ticket(key, ticket)
            for layer in range(pair.layout.num_layers):
                pair.outbound.layer_ready(key, layer, 0, [BlockIndex(block)])  # one block of two: the lock is held
            pair.decode_events.expect(Started)
        pair.outbound.peer_gone(Incarnation("somebody else"))
        pair.outbound.peer_gone(pair.decode.incarnation)
        for _ in keys:
            aborted = pair.prefill_events.expect(Aborted)
            assert isinstance(aborted, Aborted)
            assert isinstance(aborted.error, PeerGone)
        assert pair.prefill_events.empty()
        for _ in keys:
            pair.decode_events.expect(Lost)
        key = pair.key()  # and the arena is mapped again when it is needed again
        pair.outbound.open(key, 4)
        ticket = pair.ticket(key, [9])
        pair.inbound.grant(ticket)
        pair.outbound.ticket(key, ticket)
        pair.announce(key, [1])
        pair.outbound.seal(key, SealInfo((1,)))
        sealed = pair.decode_events.expect(Sealed)
        assert isinstance(sealed, Sealed)
        assert pair.arrived([1], [9])
        pair.inbound.commit(sealed.ticket)
        pair.prefill_events.expect(Committed)
