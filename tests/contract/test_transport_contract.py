"""The contract that every transport keeps: real sockets, real segments, real threads."""

from pathlib import Path

import pytest

from kv_transfer.plane import Committed, Sealed, SealInfo
from tests.contract.rig import BACKENDS, rig


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hand_off_lands_whole_and_commits(backend: str, tmp_path: Path) -> None:
    with rig(backend, tmp_path) as pair:
        key = pair.key()
        source, target = [4, 9, 2], [7, 0, 31]
        pair.outbound.open(key, 12)
        ticket = pair.ticket(key, target)
        pair.inbound.grant(ticket)
        pair.outbound.ticket(key, ticket)
        pair.announce(key, source)
        pair.outbound.seal(key, SealInfo((17,)))
        sealed = pair.decode_events.expect(Sealed)
        assert sealed.seal == SealInfo((17,))
        assert pair.landed_equals_sent(source, target)
        pair.inbound.commit(ticket.id)
        report = pair.prefill_events.expect(Committed).report
        assert report.bytes_sent == sealed.bytes_landed == 3 * pair.layout.block_bytes
        assert report.slabs_sent == 3 * pair.layout.num_layers
