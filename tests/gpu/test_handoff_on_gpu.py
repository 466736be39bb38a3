"""One prefill and one decode node on an NVIDIA GPU, over cuda_ipc; skipped without one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster import Cluster
from tests.models import FamilyName, build_model, find_stable_prompts
from tests.parity.device_cases import LENGTHS, OUTPUT_TOKENS, check_tokens, count_handoffs

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_batched_tokens": 256,
    "max_num_seqs": 4,
    "prefill": 1,
    "decode": 1,
    "mode": "disaggregated",
}


async def check_family(
    family: FamilyName, tmp_path: Path, transport: str, lengths: tuple[int, ...] = LENGTHS
) -> dict[tuple[str, str], float]:
    """Check the tokens of a cluster; returns its hand-offs."""
    folder = build_model(family, tmp_path)
    prompts = find_stable_prompts(folder, lengths, OUTPUT_TOKENS)
    (tmp_path / "cluster").mkdir()
    cluster = Cluster(tmp_path / "cluster", model=str(folder), transport=transport, **SETTINGS)
    async with cluster:
        await check_tokens(cluster, prompts)
        await cluster.wait_idle()
        handoffs = await count_handoffs(cluster)
    cluster.assert_clean()
    return handoffs


@pytest.mark.parametrize("transport", ["cuda_ipc", "auto"])
async def test_tokens_equal_transformers(transport: str, tmp_path: Path) -> None:
    assert set(await check_family("llama", tmp_path, transport)) == {("committed", "cuda_ipc")}


async def test_tokens_of_another_family(tmp_path: Path) -> None:
    assert set(await check_family("qwen3", tmp_path, "auto")) == {("committed", "cuda_ipc")}


@pytest.mark.parametrize("transport", ["shm", "zmq"])
async def test_staged_tokens_equal_transformers(transport: str, tmp_path: Path) -> None:
    found = await check_family("llama", tmp_path, transport, LENGTHS[:4])
    assert set(found) == {("committed", transport)}
