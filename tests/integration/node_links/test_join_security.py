"""Joining over real gRPC on loopback: tokens, certificates, the first message, a second join."""

import asyncio

import grpc
import pytest

from baton.cluster_link.dialer import (
    PROOF_METADATA_KEY,
    CoordinatorDialer,
    derive_link_proof,
    is_token_mismatch,
)
from baton.cluster_link.order_codec import attempt_key_from_pb
from baton.cluster_link.stream import open_link_stream
from baton.errors import (
    ConfigError,
)
from baton.network import cluster_certificates
from baton.pb import cluster_pb2 as pb
from coordinator.node_links.node_link_service import JOIN_TIMEOUT_SECONDS
from tests.fake_nodes import FakeNode
from tests.integration.coordinator_harness import (
    CoordinatorHarness,
    running_coordinator,
)

PROMPT = tuple(range(1, 40))


@pytest.mark.parametrize("token", ["", "wrong", "seçret"])
async def test_node_with_a_wrong_token_fails_the_handshake(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.node_links.node_link_server.STREAM_OPEN_TIMEOUT_SECONDS", 0.2)
    async with running_coordinator(cluster_token="secret") as coordinator:
        node = FakeNode(coordinator.cluster_port_address, "p0", "prefill", cluster_token=token)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.join()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert is_token_mismatch(caught.value)
        await node.drop_connection()
        joins = coordinator.dispatcher.brain.counters.joins
        async with asyncio.timeout(30.0):
            while not joins["unauthenticated"]:
                await asyncio.sleep(0.05)
        async with FakeNode(
            coordinator.cluster_port_address, "p0", "prefill", cluster_token="secret"
        ):
            assert len(coordinator.dispatcher.node_connections) == 1
        assert joins["joined"] == 1


async def test_client_without_a_certificate_gets_no_stream() -> None:
    async with running_coordinator(cluster_token="secret") as coordinator:
        authority = cluster_certificates._authority_certificate(
            cluster_certificates._derive_authority_key("secret")
        )
        named = (
            ("grpc.ssl_target_name_override", cluster_certificates.COORDINATOR_CERTIFICATE_NAME),
        )
        bare = grpc.aio.secure_channel(
            coordinator.cluster_port_address, grpc.ssl_channel_credentials(authority), options=named
        )
        for channel in (bare, grpc.aio.insecure_channel(coordinator.cluster_port_address)):
            async with channel:
                call = open_link_stream(
                    channel, metadata=((PROOF_METADATA_KEY, derive_link_proof("secret")),)
                )
                assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert coordinator.dispatcher.node_connections == {}


@pytest.mark.parametrize(
    "metadata",
    [(), ((PROOF_METADATA_KEY, derive_link_proof("wrong")),), ((PROOF_METADATA_KEY, b""),)],
    ids=len,
)
async def test_certificate_without_token_proof_is_refused(
    metadata: tuple[tuple[str, bytes], ...],
) -> None:
    async with running_coordinator(cluster_token="secret") as coordinator:
        async with CoordinatorDialer("secret").open_channel(
            coordinator.cluster_port_address
        ) as channel:
            call = open_link_stream(channel, metadata=metadata)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert coordinator.dispatcher.brain.counters.joins == {"unauthenticated": 1}


async def test_node_refuses_a_server_without_the_coordinator_certificate() -> None:
    server = grpc.aio.server()
    port = server.add_secure_port(
        "127.0.0.1:0", cluster_certificates.decode_server_credentials("secret")
    )
    await server.start()
    node = FakeNode(f"127.0.0.1:{port}", "d0", "decode", cluster_token="secret")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.join()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await node.drop_connection()
    await server.stop(None)


async def test_mismatched_join_is_refused_with_a_reason(coordinator: CoordinatorHarness) -> None:
    async with coordinator.make_node("p0", "prefill"):
        other = coordinator.make_node("d0", "decode", join_overrides={"model_digest": "ff"})
        with pytest.raises(ConfigError, match="model_digest 'ff', the cluster has 'abab"):
            await other.join()
        with pytest.raises(ConfigError, match="role 'cook'"):
            await coordinator.make_node("d0", "cook").join()
        assert coordinator.dispatcher.brain.counters.joins == {"joined": 1, "refused": 2}


async def test_the_first_message_must_be_join_and_come_soon(
    coordinator: CoordinatorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert JOIN_TIMEOUT_SECONDS == 5.0
    for first, patience, code in (
        (pb.NodeMessage(), 60.0, "INVALID_ARGUMENT"),
        (None, 0.05, "DEADLINE_EXCEEDED"),
    ):
        monkeypatch.setattr(
            "coordinator.node_links.node_link_service.JOIN_TIMEOUT_SECONDS", patience
        )
        node = coordinator.make_node("p0", "prefill")
        call = node.open_stream()
        if first is not None:
            await call.write(first)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code().name == code
        await node.drop_connection()


async def test_rejoin_ends_the_old_stream(coordinator: CoordinatorHarness) -> None:
    async with coordinator.make_node("p0", "prefill"), coordinator.make_node("d0", "decode") as old:
        stream = await coordinator.submit_request(PROMPT, 4)
        await old.next_order("submit")
        async with coordinator.make_node(
            "d0", "decode", join_overrides={"rejoining": old.incarnation}
        ) as new:
            await old.wait_stream_end()
            await new.send_heartbeat()
            assert attempt_key_from_pb((await new.next_order("submit")).work.key) == (
                stream.id,
                2,
                0,
            )
            assert new.incarnation != old.incarnation
        stream.cancel()
