"""One prefill and one decode node on an NVIDIA GPU, over cuda_ipc; skipped without one."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster import Cluster
from tests.gpu.figures import say
from tests.grpc_calls import GenerateAnswer
from tests.models import FamilyName, StablePrompt, build_model, find_stable_prompts
from tests.parity.device_cases import LENGTHS, OUTPUT_TOKENS, check_tokens, count_handoffs

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]
FROZEN_SECONDS = 30.0  # within which a writer is stopped, and its blocks are back after its end
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_batched_tokens": 256,
    "max_num_seqs": 4,
    "prefill": 1,
    "decode": 1,
    "mode": "disaggregated",
}


def start_call(cluster: Cluster, stable: StablePrompt) -> asyncio.Task[GenerateAnswer]:
    call = cluster.generate(list(stable.prompt), max_tokens=OUTPUT_TOKENS, temperature=0.0)
    return asyncio.create_task(call)


async def count_quarantined(cluster: Cluster) -> int:
    """Blocks of all nodes that were handed to a writer whose end is not proven."""
    return sum(ledger.quarantined for ledger in (await cluster.get_ledgers()).ledgers)


async def check_family(
    family: FamilyName,
    tmp_path: Path,
    transport: str,
    lengths: tuple[int, ...] = LENGTHS,
    **settings: Any,
) -> dict[tuple[str, str], float]:
    """Check the tokens of a cluster; returns its hand-offs."""
    folder = build_model(family, tmp_path)
    prompts = find_stable_prompts(folder, lengths, OUTPUT_TOKENS)
    (tmp_path / "cluster").mkdir()
    chosen = SETTINGS | settings | {"transport": transport}
    cluster = Cluster(tmp_path / "cluster", model=str(folder), **chosen)
    async with cluster:
        assert cluster.config.gpus.count(",") == torch.cuda.device_count()  # nodes are spread
        await check_tokens(cluster, prompts)
        await cluster.wait_idle()
        handoffs = await count_handoffs(cluster)
    cluster.assert_clean()
    return handoffs


async def test_tokens_equal_transformers(tmp_path: Path) -> None:
    assert set(await check_family("llama", tmp_path, "auto")) == {("committed", "cuda_ipc")}


async def test_requests_of_a_killed_writer_are_served_by_another(tmp_path: Path) -> None:
    """It is killed while it writes; decode gets the blocks back, and every token is right."""
    folder = build_model("llama", tmp_path)
    prompts = find_stable_prompts(folder, (257, 300, 400, 500, 600, 700), OUTPUT_TOKENS)
    (tmp_path / "cluster").mkdir()
    settings = SETTINGS | {"prefill": 2, "transport": "cuda_ipc", "max_batched_tokens": 64}
    cluster = Cluster(tmp_path / "cluster", model=str(folder), **settings)
    async with cluster:
        await check_tokens(cluster, prompts[:2])
        calls = [start_call(cluster, stable) for stable in prompts]
        await asyncio.sleep(0.05)  # some are being computed, and some handed over
        cluster.kill("prefill-0")
        for call, stable in zip(calls, prompts, strict=True):
            assert list((await call).tokens) == list(stable.reference_tokens)
        await cluster.wait_idle()
        assert await count_quarantined(cluster) == 0
        handoffs = await count_handoffs(cluster)
    say(f"hand-offs around a kill: {handoffs}")
    assert set(transport for _, transport in handoffs) <= {"cuda_ipc", "none"}


async def test_blocks_of_a_frozen_writer_stay_quarantined_until_it_is_killed(
    tmp_path: Path,
) -> None:
    """It is stopped while it holds the bytes of tickets; another one serves its requests."""
    folder = build_model("llama", tmp_path)
    prompts = find_stable_prompts(folder, (257, 300, 400, 500, 600, 700), OUTPUT_TOKENS)
    (tmp_path / "cluster").mkdir()
    timeouts = {"heartbeat": 0.2, "silence": 1.0, "ticket_ttl": 1.5, "progress_timeout": 1.5}
    settings = SETTINGS | timeouts | {"prefill": 2, "transport": "cuda_ipc"}
    cluster = Cluster(tmp_path / "cluster", model=str(folder), max_model_len=1024, **settings)
    async with cluster:
        await cluster.arm_failpoints("prefill-0", "transfer.write.after=stop+2*1")
        calls: list[tuple[StablePrompt, asyncio.Task[GenerateAnswer]]] = []
        async with asyncio.timeout(FROZEN_SECONDS):
            while await count_quarantined(cluster) == 0:
                if all(call.done() for _, call in calls):
                    calls += [(stable, start_call(cluster, stable)) for stable in prompts]
                await asyncio.sleep(0.05)
        for stable, call in calls:
            assert list((await call).tokens) == list(stable.reference_tokens)
        assert await count_quarantined(cluster) > 0
        cluster.kill("prefill-0")
        async with asyncio.timeout(FROZEN_SECONDS):
            while await count_quarantined(cluster):
                await asyncio.sleep(0.02)
        await check_tokens(cluster, prompts)
        await cluster.wait_idle()


async def test_tokens_of_another_family(tmp_path: Path) -> None:
    assert set(await check_family("qwen3", tmp_path, "auto")) == {("committed", "cuda_ipc")}


@pytest.mark.parametrize("transport", ["shm", "zmq"])
async def test_staged_tokens_equal_transformers(transport: str, tmp_path: Path) -> None:
    """Decode receives in host memory: prefill copies what its GPU has computed there first."""
    own = {"decode-0": {"transport": transport}}
    found = await check_family("llama", tmp_path, "auto", LENGTHS[:4], per_node=own)
    assert set(found) == {("committed", transport)}
