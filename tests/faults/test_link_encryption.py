"""Traffic between the coordinator and a node contains neither the cluster token nor a prompt."""

import pytest

from baton.pb.common_pb2 import TokenIds
from tests.faults.observed_cluster import ObservedCluster, make_call
from tests.history import ClientApi

pytestmark = pytest.mark.asyncio(loop_scope="session")

_HANDSHAKE = b"\x16\x03\x01"  # a TLS record that begins one
_SEARCHED_TOKENS = 8  # tokens: what would not stand in random bytes by chance


async def test_node_link_traffic_is_encrypted(observed: ObservedCluster) -> None:
    cluster = observed.cluster
    links = [cluster.proxies[f"{node} -> coordinator"] for node in cluster.node_names]
    for link in links:
        link.recorded_bytes = bytearray()
        # so that the nodes join anew, and what they show then is heard too
        link.reset_connections()
    try:
        await observed.wait_until(
            "every node dials anew", lambda: all(link.recorded_bytes for link in links)
        )
        await cluster.wait_all_joined()
        asked = make_call(ClientApi.SSE, 100, 4, salt=77)
        await observed.complete_call(asked)
    finally:
        heard = {link.name: bytes(link.recorded_bytes or b"") for link in links}
        for link in links:
            link.recorded_bytes = None
    assert all(len(bytes_of) > 1000 for bytes_of in heard.values())
    for name, bytes_of in heard.items():
        assert _HANDSHAKE in bytes_of, f"{name}: no TLS"
        assert cluster.config.cluster_token.encode() not in bytes_of
        assert name.split()[0].encode() not in bytes_of  # what a Join begins with
        assert _packed(asked.prompt[:_SEARCHED_TOKENS]) not in bytes_of
        assert _packed(asked.prompt[-_SEARCHED_TOKENS:]) not in bytes_of


def _packed(tokens: tuple[int, ...]) -> bytes:
    """Return token ids as they are encoded in a message, without tag and length."""
    packed: bytes = TokenIds(ids=tokens).SerializeToString()
    return packed[2:]
