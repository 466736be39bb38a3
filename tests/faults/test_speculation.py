"""Speculative decoding in a cluster: the reference's tokens through a hand-off and a lost node."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.pb import cluster_pb2
from tests.cluster import Cluster
from tests.grpc_calls import call_cluster_service
from tests.paced_reference import paced_reference_tokens

FEW = 3  # tokens of the vocabulary, so that drafts are right now and then
SETTINGS: dict[str, Any] = {
    "engine": "paced",
    "prefill": 1,
    "decode": 2,
    "mode": "disaggregated",
    "paced_vocab_size": FEW,
    "paced_step_ms": 4.0,
    "paced_reread": True,
    "heartbeat": 0.2,
    "silence": 1.0,
    "speculative": "ngram",
    "speculative_tokens": 5,
}
OUTPUT_TOKENS = 200


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path, **SETTINGS)
    async with made:
        yield made
        await made.wait_idle()
    made.assert_clean()


async def explain(cluster: Cluster, request_id: str) -> cluster_pb2.ExplainResponse:
    answer: cluster_pb2.ExplainResponse = await call_cluster_service(
        cluster.grpc_address, "Explain", cluster_pb2.ExplainRequest(request_id=request_id)
    )
    return answer


def count_draft_tokens(status: cluster_pb2.StatusResponse, result: str) -> float:
    name = f'baton_draft_tokens_total{{result="{result}"}}'
    return sum(node.stats.counters.get(name, 0.0) for node in status.nodes)


async def test_tokens_are_those_of_the_reference_also_after_the_loss_of_a_node(
    cluster: Cluster,
) -> None:
    prompt = [1, 2, 1, 2, 1] * 10
    expected = paced_reference_tokens(prompt, OUTPUT_TOKENS, FEW)
    fields: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    accepted = 0
    while not accepted:  # a node whose first draft was slow does not draft for a while
        answer = await cluster.generate(prompt, **fields)
        assert list(answer.tokens) == expected
        assert answer.usage.completion_tokens == OUTPUT_TOKENS
        attempt = (await explain(cluster, answer.request_id)).attempts[0]
        accepted = attempt.accepted_draft_tokens
    assert accepted < attempt.draft_tokens
    status = await cluster.wait_status(lambda seen: count_draft_tokens(seen, "accepted") > 0)
    assert count_draft_tokens(status, "rejected") > 0

    await cluster.arm_failpoints("decode", "decode.step.before=delay(0.1)+20")
    tokens: list[int] = []
    request_id = ""
    async with cluster.stream_generate([2, *prompt], **fields) as call:
        async for message in call:
            tokens += message.token_ids
            request_id = message.request_id or request_id
            if len(tokens) >= 12 and await _kill_busy_node(cluster):
                await cluster.arm_failpoints("decode", "")
    assert tokens == paced_reference_tokens([2, *prompt], OUTPUT_TOKENS, FEW)
    attempts = (await explain(cluster, request_id)).attempts
    assert len(attempts) == 2
    assert any(each.draft_tokens > 0 for each in attempts)
    for name in {"decode-0", "decode-1"} - cluster.get_pids().keys():
        cluster.start(name)
    await cluster.wait_status(lambda seen: len(seen.nodes) == 3)


async def _kill_busy_node(cluster: Cluster) -> bool:
    """Kill the decode node that runs a request, the first time; returns whether it did."""
    pids = cluster.get_pids()
    if not {"decode-0", "decode-1"} <= pids.keys():
        return False
    status = await cluster.get_status()
    busy = [node.name for node in status.nodes if node.role == "decode" and node.placed]
    if len(busy) != 1:
        return False
    cluster.kill(busy[0])
    return True
