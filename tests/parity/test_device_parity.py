"""Disaggregated over cuda_ipc == transformers, token for token in fp32, through real processes.

On CPUs the nodes' device memory is host memory behind the same interface, so that the plane, its
frames and its fences are those of a GPU and the CUDA calls are not. tests/gpu has the same test on
a GPU.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.models import FamilyName, StablePrompt, build_model, find_stable_prompts

LENGTHS = (1, 16, 17, 130, 257, 700)
OUTPUT_TOKENS = 24
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


async def check_tokens(cluster: Cluster, prompts: list[StablePrompt]) -> None:
    """Each prompt, cold and with its prefix cached."""
    for _ in range(2):
        for stable in prompts:
            answer = await cluster.generate(
                list(stable.prompt), max_tokens=OUTPUT_TOKENS, temperature=0.0
            )
            assert list(answer.tokens) == list(stable.reference_tokens)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
async def test_tokens_equal_transformers(family: FamilyName, tmp_path: Path) -> None:
    folder = build_model(family, tmp_path)
    prompts = find_stable_prompts(folder, LENGTHS, OUTPUT_TOKENS)
    (tmp_path / "cluster").mkdir()
    cluster = Cluster(tmp_path / "cluster", model=str(folder), **SETTINGS)
    async with cluster:
        await check_tokens(cluster, prompts)
        await cluster.wait_idle()
        metrics = cluster.logs
        assert metrics
    cluster.assert_clean()


async def test_a_writer_without_device_memory_falls_back(tmp_path: Path) -> None:
    """A prefill node that reads host memory, beside a decode node that prefers cuda_ipc."""
    folder = build_model("llama", tmp_path)
    prompts = find_stable_prompts(folder, LENGTHS[:3], OUTPUT_TOKENS)
    (tmp_path / "cluster").mkdir()
    settings = SETTINGS | {"prefill": 1, "transport": "auto"}
    cluster = Cluster(
        tmp_path / "cluster",
        model=str(folder),
        per_node={"prefill-0": {"transport": "cuda_ipc"}},
        **settings,
    )
    async with cluster:
        await check_tokens(cluster, prompts)
        await cluster.wait_idle()
    cluster.assert_clean()
