"""A draft model in a cluster: the tokens without one, through a hand-off and the loss of a node."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.pb import cluster_pb2
from tests.cluster import Cluster
from tests.grpc_calls import call_cluster_service
from tests.models import build_model, generate_reference, load_reference_model

OUTPUT_TOKENS = 120
PROMPT = [(7 * position) % 200 + 1 for position in range(40)]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    model = build_model("llama", tmp_path)
    made = Cluster(
        tmp_path,
        model=str(model),
        draft_model=str(model),
        dtype="float32",
        threads="1",
        speculative="draft",
        speculative_tokens=3,
        prefill=1,
        decode=2,
        mode="disaggregated",
        heartbeat=0.2,
        silence=1.0,
    )
    async with made:
        yield made
        await made.wait_idle()
    made.assert_clean()


async def test_the_next_node_drafts_for_what_a_lost_one_has_begun(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The served model drafts for itself, so that all drafts that are verified are right."""
    reference = generate_reference(
        load_reference_model(build_model("llama", tmp_path)), PROMPT, OUTPUT_TOKENS
    )
    fields: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0.0}
    await cluster.arm_failpoints("decode", "decode.step.before=delay(0.1)+20")
    tokens: list[int] = []
    request_id, killed = "", ""
    async with cluster.stream_generate(PROMPT, **fields) as call:
        async for message in call:
            tokens += message.token_ids
            request_id = message.request_id or request_id
            if len(tokens) >= 12 and not killed:
                killed = await _kill_busy_node(cluster)
                await cluster.arm_failpoints("decode", "")
    assert tokens == list(reference.tokens)
    explained: cluster_pb2.ExplainResponse = await call_cluster_service(
        cluster.grpc_address, "Explain", cluster_pb2.ExplainRequest(request_id=request_id)
    )
    first, second = explained.attempts
    for attempt in (first, second):
        assert 0 < attempt.accepted_draft_tokens <= attempt.draft_tokens
    cluster.start(killed)
    await cluster.wait_status(lambda seen: len(seen.nodes) == 3)


async def _kill_busy_node(cluster: Cluster) -> str:
    status = await cluster.get_status()
    (busy,) = [node.name for node in status.nodes if node.role == "decode" and node.placed]
    cluster.kill(busy)
    return busy
