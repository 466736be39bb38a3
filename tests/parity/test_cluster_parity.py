"""Disaggregated == colocated == Hugging Face, token for token in fp32, through real processes and
both front doors.

Every prompt is asked for cold and then again with its prefix cached, all of a pass at once,
streaming and not, over HTTP and gRPC. Sampled requests must draw the same tokens alone, in a crowd,
and over every transport.

One cluster of each family has a decode node for each transport, and a tenant for each: nobody finds
what another has cached. One of the three nodes decodes speculatively, which changes no token.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
import pytest_asyncio
import torch

from baton.pb import cluster_pb2, common_pb2, generation_pb2, generation_pb2_grpc
from coordinator.core.admission.tenants import hash_key
from tests.cluster import Cluster
from tests.grpc_calls import bearer_metadata, call_cluster_service
from tests.models import FamilyName, StablePrompt, build_model, find_stable_prompts

IN_MODULE = pytest.mark.asyncio(loop_scope="module")
LENGTHS = (1, 15, 16, 17, 33, 130, 257, 700)
OUTPUT_TOKENS = 33  # over two boundaries of blocks at least
FAMILIES: tuple[FamilyName, ...] = (
    "llama",
    "qwen2",
    "mistral",
    "qwen3",
)  # in a mistral, prompts outgrow the window
NODE_BY_TRANSPORT = {"shm": "decode-0", "zmq": "decode-1", "grpc": "decode-2"}
if torch.cuda.is_available():
    # With two GPUs, decode-2 computes on the one that the prefill node does not have.
    NODE_BY_TRANSPORT |= {"cuda_ipc": "decode-2", "grpc": "decode-3"}
SPECULATING_NODE = NODE_BY_TRANSPORT["zmq"]
SETTINGS_WITHOUT_HANDOFF: dict[str, dict[str, Any]] = {
    "colocated": {"prefill": 0, "mode": "colocated"},
    "torch": {"prefill": 0, "mode": "colocated", "cpu_kernels": "torch"},
    "auto": {
        "mode": "auto",
        "local_prefill_share": 0.2,
    },  # prompts in small pieces, by whoever is sooner
}
WITHOUT_HAND_OFF = [(family, "colocated") for family in FAMILIES] + [
    ("llama", "auto"),
    ("qwen2", "torch"),
]
SAMPLED = {"max_tokens": 24, "temperature": 1.0, "top_k": 40, "top_p": 0.95}
SEEDS = range(6)
TENANT = """
[[tenants]]
name = "{name}"
keys = ["sha256:{hash}"]
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[FamilyName, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: build_model(family, root) for family in FAMILIES}


@pytest.fixture(scope="module")
def references(models: dict[FamilyName, Path]) -> dict[FamilyName, list[StablePrompt]]:
    found = {
        family: find_stable_prompts(folder, LENGTHS, OUTPUT_TOKENS)
        for family, folder in models.items()
    }
    assert all(
        len(each.reference_tokens) == OUTPUT_TOKENS
        for prompts in found.values()
        for each in prompts
    )
    assert all(each.min_logit_margin > 1e-3 for prompts in found.values() for each in prompts)
    return found


@pytest.fixture(scope="module")
def drawn() -> dict[tuple[FamilyName, int], list[int]]:
    """What each seed drew the first time that it was asked for: every later answer must be the
    same."""
    return {}


@dataclass
class ParityClient:
    """A client of a cluster, by the key of its tenant if it has one."""

    cluster: Cluster
    http: httpx2.AsyncClient
    api_key: str = ""

    async def generate_by(self, prompt: Sequence[int], way: int) -> list[int]:
        """`way` 0..3: HTTP or gRPC, streaming or not."""
        fields: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "temperature": 0.0}
        if way < 2:
            return await self._by_http(prompt, stream=way == 0, **fields)
        if way == 2:
            return await self.generate_streamed(prompt, **fields)
        request = generation_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=prompt), **fields
        )
        async with grpc.aio.insecure_channel(self.cluster.grpc_address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            whole = await stub.GenerateOnce(
                request, timeout=120, metadata=bearer_metadata(self.api_key)
            )
        return list(whole.token_ids)

    async def generate_streamed(self, prompt: Sequence[int], **fields: Any) -> list[int]:
        return list((await self.cluster.generate(prompt, api_key=self.api_key, **fields)).tokens)

    async def _by_http(self, prompt: Sequence[int], stream: bool, **fields: Any) -> list[int]:
        body = {"prompt": list(prompt), "return_token_ids": True, "stream": stream, **fields}
        headers = dict(bearer_metadata(self.api_key))
        if not stream:
            answer = await self.http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            assert answer.json()["usage"]["completion_tokens"] == len(choice["token_ids"])
            return list(choice["token_ids"])
        tokens: list[int] = []
        async with self.http.stream(
            "POST", "/v1/completions", json=body, headers=headers
        ) as response:
            assert response.status_code == 200
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                tokens += choice.get("token_ids") or []
        return tokens

    async def get_counters(self, name: str) -> dict[str, float]:
        """By labels, as /metrics has them."""
        lines = (await self.http.get(f"{self.cluster.admin_url}/metrics")).text.splitlines()
        found = [line.rpartition(" ") for line in lines if line.startswith(f"{name}{{")]
        return {labels: float(value) for labels, _, value in found}

    async def count_prompt_tokens(self) -> dict[str, float]:
        return {
            labels.split('"')[1]: n
            for labels, n in (await self.get_counters("baton_prompt_tokens_total")).items()
        }


@asynccontextmanager
async def running_cluster(folder: Path, model: Path, **settings: Any) -> AsyncIterator[Cluster]:
    made = Cluster(folder, model=str(model), dtype="float32", max_batched_tokens=256, **settings)
    async with made:
        yield made
        await made.wait_idle()
    made.assert_clean()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> FamilyName:
    found: FamilyName = request.param
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    family: FamilyName, models: dict[FamilyName, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp(family)
    tenants = folder / "tenants.toml"
    tenants.write_text(
        "".join(
            TENANT.format(name=name, hash=hash_key(tenant_key(name).encode()).hex())
            for name in NODE_BY_TRANSPORT
        )
    )
    own: dict[str, dict[str, object]] = {
        node: {"transport": transport} for transport, node in NODE_BY_TRANSPORT.items()
    }
    if not torch.cuda.is_available():
        own[SPECULATING_NODE]["speculative"] = "ngram"
    async with running_cluster(
        folder, models[family], decode=len(NODE_BY_TRANSPORT), per_node=own, tenants=str(tenants)
    ) as made:
        yield made


def tenant_key(tenant: str) -> str:
    return f"the-key-of-tenant-{tenant}"


@IN_MODULE
@pytest.mark.parametrize("transport", NODE_BY_TRANSPORT)
async def test_tokens_equal_transformers(
    cluster: Cluster,
    family: FamilyName,
    transport: str,
    references: dict[FamilyName, list[StablePrompt]],
    drawn: dict[tuple[FamilyName, int], list[int]],
) -> None:
    for name in NODE_BY_TRANSPORT.values():
        await set_drained(cluster, name, name != NODE_BY_TRANSPORT[transport])
    async with httpx2.AsyncClient(base_url=cluster.http_url, timeout=120) as http:
        asker = ParityClient(cluster, http, tenant_key(transport))
        turn = FAMILIES.index(family) + list(NODE_BY_TRANSPORT).index(transport)
        await check_cold_and_cached(asker, transport, references[family], turn)
        await check_seeds_repeat(asker, references[family][4].prompt, family, drawn)
        drafts = await asker.get_counters("baton_drafts_total")
        if not torch.cuda.is_available():
            assert [SPECULATING_NODE in labels for labels in drafts] == [True]
    await cluster.wait_idle()


@IN_MODULE
@pytest.mark.parametrize(("kind", "setup"), WITHOUT_HAND_OFF)
async def test_tokens_without_a_handoff_equal_transformers(
    kind: FamilyName,
    setup: str,
    models: dict[FamilyName, Path],
    references: dict[FamilyName, list[StablePrompt]],
    drawn: dict[tuple[FamilyName, int], list[int]],
    tmp_path: Path,
) -> None:
    """Or, by `auto`, perhaps with some."""
    async with (
        running_cluster(tmp_path, models[kind], **SETTINGS_WITHOUT_HANDOFF[setup]) as cluster,
        httpx2.AsyncClient(base_url=cluster.http_url, timeout=120) as http,
    ):
        asker = ParityClient(cluster, http)
        await check_cold_and_cached(asker, setup, references[kind], FAMILIES.index(kind))
        await check_seeds_repeat(asker, references[kind][4].prompt, kind, drawn)


async def check_cold_and_cached(
    asker: ParityClient, setup: str, prompts: list[StablePrompt], turn: int
) -> None:
    before = await asker.count_prompt_tokens()
    for cached in (False, True):
        pairs = [(number, way) for way in range(4) for number in range(len(prompts))]
        if (
            not cached
        ):  # each prompt once while nobody has seen it: its way is another one in each case
            pairs = [(number, (number + turn) % 4) for number in range(len(prompts))]
        answers = await ask_for_all(asker, setup, prompts, pairs)
        wrong = [
            (LENGTHS[number], way)
            for (number, way), answer in zip(pairs, answers, strict=True)
            if answer != list(prompts[number].reference_tokens)
        ]
        assert not wrong, f"cached: {cached}, (prompt length, way): {wrong}"
        await check_prompt_token_sources(asker, setup, before, len(pairs) if cached else 0)


async def ask_for_all(
    asker: ParityClient, setup: str, prompts: list[StablePrompt], pairs: Sequence[tuple[int, int]]
) -> list[list[int]]:
    """The answers for pairs of (prompt, way), asked for all at once.

    By `auto`, the decode node computes every second prompt, because the prefill node is drained
    meanwhile. Where it computes the others follows from what it has measured.
    """
    if setup != "auto":
        parts = [pairs]
    else:
        parts = [pairs[::2], pairs[1::2]]
        await set_drained(asker.cluster, "prefill-0", True)
    answers: dict[tuple[int, int], list[int]] = {}
    for part in parts:
        found = await asyncio.gather(
            *(asker.generate_by(prompts[number].prompt, way) for number, way in part)
        )
        answers |= zip(part, found, strict=True)
        if setup == "auto":
            await set_drained(asker.cluster, "prefill-0", False)
    return [answers[pair] for pair in pairs]


async def set_drained(cluster: Cluster, node: str, is_drained: bool) -> None:
    """Drain the node, or put it back in service."""
    kind = cluster_pb2.DrainRequest if is_drained else cluster_pb2.UndrainRequest
    method = "Drain" if is_drained else "Undrain"
    await call_cluster_service(cluster.grpc_address, method, kind(node=node))


async def check_seeds_repeat(
    asker: ParityClient,
    prompt: Sequence[int],
    family: FamilyName,
    drawn: dict[tuple[FamilyName, int], list[int]],
) -> None:
    """Alone first, then all at once; and over every transport, since `drawn` outlives the
    cluster."""
    alone = [await asker.generate_streamed(prompt, seed=seed, **SAMPLED) for seed in SEEDS]
    together = await asyncio.gather(
        *(asker.generate_streamed(prompt, seed=seed, **SAMPLED) for seed in SEEDS)
    )
    assert alone == list(together)
    for seed, tokens in zip(SEEDS, alone, strict=True):
        assert drawn.setdefault((family, seed), tokens) == tokens
    assert len({tuple(tokens) for tokens in alone}) > 1


async def check_prompt_token_sources(
    asker: ParityClient, setup: str, before: dict[str, float], again: int
) -> None:
    """By metric, each prompt token once. Cold, decode computes none but a lone first token: then
    the KV that it went on from was another process's."""
    tokens = {
        source: count - before.get(source, 0)
        for source, count in (await asker.count_prompt_tokens()).items()
    }
    passes = 1 + again // len(LENGTHS)
    assert sum(tokens.values()) == passes * sum(LENGTHS)
    if again:
        assert tokens["local_cache"] > 3 * sum(LENGTHS)
    elif setup == "auto":
        ways = await asker.get_counters("baton_placements_total")
        assert any('way="local",why="no_prefill_node"' in labels for labels in ways), ways
        assert tokens["computed_decode"] >= sum(LENGTHS[::2])
    elif setup not in ("colocated", "torch"):
        assert tokens["computed_decode"] == 1
        assert tokens["computed_prefill"] > 0.95 * sum(LENGTHS)
        handed = await asker.get_counters("baton_handoffs_total")
        assert any(
            f'transport="{setup}"' in labels and 'outcome="committed"' in labels
            for labels in handed
        )
