"""Somebody listens on the link between the coordinator and a node: what passes says neither the token nor a prompt."""

import pytest

from baton.pb.common_pb2 import TokenIds
from tests.faults.scene import Scene, call
from tests.history import Door

pytestmark = pytest.mark.asyncio(loop_scope="session")

_HANDSHAKE = b"\x16\x03\x01"  # a TLS record that begins one
_PIECE = 8  # tokens: what would not stand in random bytes by chance


async def test_what_passes_between_coordinator_and_nodes_cannot_be_read(scene: Scene) -> None:
    cluster = scene.cluster
    links = [cluster.links[f"{node} -> coordinator"] for node in cluster.nodes]
    for link in links:
        link.record = bytearray()
        link.reset()  # so that the nodes join anew, and what they show then is heard too
    try:
        await scene.until("every node dials anew", lambda: all(link.record for link in links))
        await cluster.whole()
        asked = call(Door.SSE, 100, 4, salt=77)
        await scene.answer(asked)
    finally:
        heard = {link.name: bytes(link.record or b"") for link in links}
        for link in links:
            link.record = None
    assert all(len(bytes_of) > 1000 for bytes_of in heard.values())
    for name, bytes_of in heard.items():
        assert _HANDSHAKE in bytes_of, f"{name}: no TLS"
        assert cluster.config.cluster_token.encode() not in bytes_of
        assert name.split()[0].encode() not in bytes_of  # what a Join begins with
        assert _packed(asked.prompt[:_PIECE]) not in bytes_of
        assert _packed(asked.prompt[-_PIECE:]) not in bytes_of


def _packed(tokens: tuple[int, ...]) -> bytes:
    """As they stand in a message, without its tag and length."""
    packed: bytes = TokenIds(ids=tokens).SerializeToString()
    return packed[2:]
