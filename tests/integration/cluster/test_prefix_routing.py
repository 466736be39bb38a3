"""Prompts that share beginnings, on real processes: nodes tell what they hold, and requests go
where it is."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.pb import cluster_pb2 as pb
from tests.cluster import Cluster
from tests.cluster_metrics import (
    read_metric,
    wait_known_blocks,
)
from tests.grpc_calls import call_cluster_service
from tests.paced_reference import paced_reference_tokens


@pytest.mark.asyncio
async def test_conversations_are_routed_to_the_node_with_their_prefix(tmp_path: Path) -> None:
    """Requests that share a prefix go to the prefill node that has it cached until it dies."""
    settings: dict[str, Any] = {
        # Slow enough that reuse is predicted to be faster on a busy machine too.
        "paced_prefill_us_per_token": 1000.0,
        "paced_step_ms": 2.0,
        "heartbeat": 0.1,
    }
    cluster = Cluster(tmp_path, engine="paced", prefill=2, decode=2, **settings)
    async with cluster:
        await run_conversations(cluster)
    cluster.assert_clean()


async def run_conversations(cluster: Cluster) -> None:
    prefixes = [[100 * number + place % 97 for place in range(256)] for number in range(1, 5)]
    blocks = await read_metric(cluster, "baton_prefix_directory_blocks")

    async def send_turn(conversation: int, turn: int) -> str:
        """Send a request whose prompt is the prefix of this conversation and a suffix of its own.

        Return the name of the prefill node that computed it.
        """
        suffix = 1000 * turn + 50 * conversation
        prompt = [*prefixes[conversation], *range(suffix, suffix + 20)]
        # The prefill node's report of its cached tokens counts if it arrives before the end.
        answer = await cluster.generate(prompt, max_tokens=40, ignore_eos=True)
        assert list(answer.tokens) == paced_reference_tokens(prompt, 40)
        request = pb.ExplainRequest(request_id=answer.request_id)
        explanation: pb.ExplainResponse = await call_cluster_service(
            cluster.grpc_address, "Explain", request
        )
        attempt = explanation.attempts[-1]
        if turn > 1:
            assert explanation.sources.local_cache >= 256
            chosen = [one for one in attempt.considered if one.chosen and one.role == "prefill"]
            assert [one.held_tokens >= 256 for one in chosen] == [True], str(explanation)
        assert all(one.HasField("predicted_seconds") for one in attempt.considered if one.able)
        assert attempt.predicted.prefill > 0
        return attempt.prefill_node

    # Two at a time, so that each node computes half of the prompts: a node with much more recent
    # work than the other would count as overloaded.
    nodes: list[str] = []
    for conversation in range(0, len(prefixes), 2):
        nodes += await asyncio.gather(send_turn(conversation, 1), send_turn(conversation + 1, 1))
    await wait_known_blocks(cluster, blocks + 4 * 16)
    assert len(set(nodes)) == 2
    # Several requests in a row for the same node, which round robin would not send there.
    for conversation in sorted(range(len(prefixes)), key=nodes.__getitem__):
        for turn in (2, 3):
            assert await send_turn(conversation, turn) == nodes[conversation]
    assert await read_metric(cluster, "baton_prefix_directory_resyncs_total") == 0
    assert 0 <= await read_metric(cluster, 'baton_prediction_error_ratio{quantity="prefill"}') <= 1
    cluster.kill(nodes[0])
    prompt = [*prefixes[0], *range(9000, 9020)]
    answer = await cluster.generate(prompt, max_tokens=4, ignore_eos=True)
    assert list(answer.tokens) == paced_reference_tokens(prompt, 4)
    cluster.start(nodes[0])  # it sweeps what it left
    await cluster.wait_status(lambda status: len(status.nodes) == 4)
    await cluster.wait_idle()
