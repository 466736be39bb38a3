"""In int8, disaggregated == colocated, token for token, through real processes.

Blocks are moved as bytes, so a decode node goes on from exactly the KV that a prefill node or the
pool has. Requests are sent one after another, so that both clusters compute the same chunks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.models import build_model
from tests.parity.pool_cases import wait_publications_done
from tests.pool.pooled_cluster import get_token_sources, pooled_cluster

LENGTHS = (1, 16, 33, 257, 700)
OUTPUT_TOKENS = 24
PROMPTS = [[(place * place + length) % 509 for place in range(length)] for length in LENGTHS]
SETTINGS: dict[str, Any] = {
    "device": "cpu",  # int8 is for CPUs
    "dtype": "float32",
    "kv_dtype": "int8",
    "threads": "1",
    "max_batched_tokens": 256,
}
CLUSTERS: dict[str, dict[str, Any]] = {
    "colocated": {"prefill": 0, "decode": 1, "mode": "colocated"},
    "shm": {"prefill": 1, "decode": 1, "mode": "disaggregated", "transport": "shm"},
    "zmq": {"prefill": 1, "decode": 1, "mode": "disaggregated", "transport": "zmq"},
}
INT8_MISMATCH = "layout.dtype 'int8', the cluster has 'float32'"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("llama", tmp_path_factory.mktemp("models"))


async def generate_all(cluster: Cluster, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [
        list((await cluster.generate(prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0)).tokens)
        for prompt in prompts
    ]


@pytest.mark.parametrize(
    ("quantize", "cpu_kernels"), [("none", "auto"), ("int8", "auto"), ("int8", "torch")]
)
async def test_disaggregated_tokens_equal_colocated_ones(
    tmp_path: Path, model: Path, quantize: str, cpu_kernels: str
) -> None:
    found = []
    kernels: dict[str, Any] = {"quantize": quantize, "cpu_kernels": cpu_kernels}
    for name, settings in CLUSTERS.items():
        folder = tmp_path / name
        folder.mkdir()
        made = Cluster(folder, model=str(model), **SETTINGS, **kernels, **settings)
        async with made as cluster:
            found.append(await generate_all(cluster, PROMPTS))
            await cluster.wait_idle()
        made.assert_clean()
    assert found[1] == found[0]
    assert found[2] == found[0]


async def test_tokens_are_the_same_with_pool_hits(tmp_path: Path, model: Path) -> None:
    settings = SETTINGS | {"placement": "round_robin", "pool_memory": "16MiB"}
    async with pooled_cluster(
        tmp_path, prefill=2, decode=2, model=str(model), **settings
    ) as cluster:
        cold = await cluster.generate(PROMPTS[-1], max_tokens=OUTPUT_TOKENS, temperature=0.0)
        await wait_publications_done(cluster)
        again = await cluster.generate(PROMPTS[-1], max_tokens=OUTPUT_TOKENS, temperature=0.0)
        assert (await get_token_sources(cluster, again))["pool"] > 600
        assert list(again.tokens) == list(cold.tokens)


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ({"kv_dtype": "int8"}, INT8_MISMATCH),
        ({"quantize": "int8"}, "quantization 'int8', the cluster has 'none'"),
    ],
)
async def test_a_node_of_another_quantization_is_refused(
    tmp_path: Path, model: Path, own: dict[str, str], reason: str
) -> None:
    cluster = Cluster(
        tmp_path,
        model=str(model),
        device="cpu",
        dtype="float32",
        prefill=1,
        decode=2,
        per_node={"decode-1": own},
        held_back=["decode-1"],
    )
    async with cluster:
        cluster.start("decode-1")
        assert await cluster.wait_for_exit("decode-1", 60.0) == 2
        assert reason in cluster.log_tail("decode-1")
        status = await cluster.get_status()
        assert {node.name for node in status.nodes} == {"prefill-0", "decode-0"}
        await generate_all(cluster, PROMPTS[:2])
