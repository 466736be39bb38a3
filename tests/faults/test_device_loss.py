"""The device of a node is lost while it serves: its process ends, its requests go on elsewhere."""

import asyncio
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.paced_reference import paced_reference_tokens

pytestmark = pytest.mark.asyncio

OUTPUT_TOKENS = 40
ROUNDS = 20  # of prompts
SETTINGS: dict[str, Any] = {
    "engine": "paced",
    "model": "",
    "paced_step_ms": 5.0,
    "heartbeat": 0.2,
    "silence": 2.0,
    "prefill": 2,
    "decode": 2,
    "mode": "disaggregated",
    "max_num_seqs": 16,
    "max_batched_tokens": 64,
}


async def get_joined_node_names(cluster: Cluster) -> set[str]:
    return {node.name for node in (await cluster.get_status()).nodes}


@pytest.mark.parametrize(
    ("role", "method", "successes"),
    [("decode", "run", 15), ("prefill", "run", 8), ("prefill", "save_blocks", 0)],
)
async def test_requests_survive_a_lost_device(
    role: str, method: str, successes: int, tmp_path: Path
) -> None:
    """Every second prompt begins with another one, whose blocks are then in the cache."""
    name = f"{role}-1"
    losing = {"ROLE": role, "LOST_IN": method, "LOST_AFTER": successes}
    cluster = Cluster(tmp_path, per_node={name: losing}, held_back=[name], **SETTINGS)
    prompts = [[salt, *range(1, 150)] for salt in range(1, 11)]
    longer = [[*prompt, *range(300, 330)] for prompt in prompts]
    async with cluster:
        spec = cluster._specs[name]
        cluster._specs[name] = dataclasses.replace(spec, module="tests.faults.losing_node")
        cluster.start(name)
        await cluster.wait_status(lambda status: len(status.nodes) == 4)
        for some in itertools.islice(itertools.cycle((prompts, longer)), ROUNDS):
            answers = await asyncio.gather(
                *(cluster.generate(prompt, max_tokens=OUTPUT_TOKENS) for prompt in some)
            )
            assert [list(answer.tokens) for answer in answers] == [
                paced_reference_tokens(prompt, OUTPUT_TOKENS) for prompt in some
            ]
            if some is longer and name not in await get_joined_node_names(cluster):
                break  # otherwise the node got none of these prompts, and may get the next ones
        assert await cluster.wait_for_exit(name) == 1
        assert "an illegal memory access was encountered" in cluster.log_tail(name)
        cluster._specs[name] = spec
        cluster.start(name)
        await cluster.wait_status(lambda status: len(status.nodes) == 4)
        await cluster.wait_idle()
    cluster.assert_clean()
