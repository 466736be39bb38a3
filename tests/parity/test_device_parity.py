"""Disaggregated over cuda_ipc == transformers, token for token in fp32, through real processes.

On CPUs the nodes' device memory is host memory behind the same interface, so that the plane, its
frames and its fences are those of a GPU and the CUDA calls are not. On a GPU the same is tested by
tests/gpu/test_handoff_on_gpu.py.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.models import FamilyName, build_model, find_stable_prompts
from tests.parity.device_cases import LENGTHS, OUTPUT_TOKENS, check_tokens, count_handoffs

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": "1",
    "max_batched_tokens": 256,
    "prefill": 2,
    "decode": 1,
    "mode": "disaggregated",
    "transport": "cuda_ipc",
}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
async def test_tokens_equal_transformers(family: FamilyName, tmp_path: Path) -> None:
    folder = build_model(family, tmp_path)
    prompts = find_stable_prompts(folder, LENGTHS, OUTPUT_TOKENS)
    (tmp_path / "cluster").mkdir()
    cluster = Cluster(tmp_path / "cluster", model=str(folder), **SETTINGS)
    async with cluster:
        await check_tokens(cluster, prompts)
        await cluster.wait_idle()
        assert set(await count_handoffs(cluster)) == {("committed", "cuda_ipc")}
    cluster.assert_clean()


async def test_writer_with_device_memory_uses_another_transport_for_a_peer_without(
    tmp_path: Path,
) -> None:
    """Decode computes in host memory: what prefill sends it is copied there first."""
    folder = build_model("llama", tmp_path)
    prompts = find_stable_prompts(folder, LENGTHS[:3], OUTPUT_TOKENS)
    (tmp_path / "cluster").mkdir()
    settings = SETTINGS | {"prefill": 1, "transport": "auto"}
    own = {"prefill-0": {"transport": "cuda_ipc"}}
    cluster = Cluster(tmp_path / "cluster", model=str(folder), per_node=own, **settings)
    async with cluster:
        await check_tokens(cluster, prompts)
        await cluster.wait_idle()
        assert set(await count_handoffs(cluster)) == {("committed", "shm")}
    cluster.assert_clean()


async def test_writer_without_device_memory_is_served_by_another_transport(tmp_path: Path) -> None:
    """Prefill computes in host memory, which decode learns from the address of its plane."""
    folder = build_model("llama", tmp_path)
    prompts = find_stable_prompts(folder, LENGTHS[:3], OUTPUT_TOKENS)
    (tmp_path / "cluster").mkdir()
    settings = SETTINGS | {"prefill": 1, "transport": "zmq"}
    own = {"decode-0": {"transport": "cuda_ipc"}}
    cluster = Cluster(tmp_path / "cluster", model=str(folder), per_node=own, **settings)
    async with cluster:
        await check_tokens(cluster, prompts)
        await cluster.wait_idle()
        assert set(await count_handoffs(cluster)) == {("committed", "shm")}
        assert cluster.log_tail("decode-0").count("does not travel by cuda_ipc") == 1
    cluster.assert_clean()
