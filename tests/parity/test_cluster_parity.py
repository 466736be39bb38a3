"""Disaggregated == colocated == Hugging Face, token for token in fp32, through real processes and both front doors.

Every prompt is asked for cold and then again with its prefix cached, all of a pass at once, streaming and not, over
HTTP and gRPC. Sampled requests must draw the same tokens alone, in a crowd, and over every transport.
"""

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from baton.pb import common_pb2, generation_pb2, generation_pb2_grpc
from tests.cluster import Cluster
from tests.models import ClearPrompt, Family, build_model, clear_prompts

LENGTHS = (1, 15, 16, 17, 33, 130, 257, 700)
OUTPUT = 48
SETUPS: dict[str, dict[str, Any]] = {
    "shm": {"transport": "shm"},
    "zmq": {"transport": "zmq"},
    "grpc": {"transport": "grpc"},
    "colocated": {"prefill": 0, "mode": "colocated"},
    "auto": {"mode": "auto", "local_prefill_share": 0.2},  # prompts in small pieces, by whoever is sooner
}
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "mistral", "qwen3")  # in a mistral, prompts outgrow the window
CASES = [
    (family, setup) for family, setup in itertools.product(FAMILIES, SETUPS) if setup != "auto" or family == "llama"
]
SAMPLED = {"max_tokens": 24, "temperature": 1.0, "top_k": 40, "top_p": 0.95}
SEEDS = range(6)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: build_model(family, root) for family in FAMILIES}


@pytest.fixture(scope="module")
def references(models: dict[Family, Path]) -> dict[Family, list[ClearPrompt]]:
    found = {family: clear_prompts(folder, LENGTHS, OUTPUT) for family, folder in models.items()}
    assert all(len(each.answer) == OUTPUT for prompts in found.values() for each in prompts)
    assert all(each.margin > 1e-3 for prompts in found.values() for each in prompts)
    return found


@pytest.fixture(scope="module")
def drawn() -> dict[tuple[Family, int], list[int]]:
    """What each seed drew the first time that it was asked for: every later answer must be the same."""
    return {}


async def http_tokens(client: httpx.AsyncClient, prompt: Sequence[int], stream: bool, **fields: Any) -> list[int]:
    body = {"prompt": list(prompt), "return_token_ids": True, "stream": stream, **fields}
    if not stream:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert answer.json()["usage"]["completion_tokens"] == len(choice["token_ids"])
        return list(choice["token_ids"])
    tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        chunk = json.loads(line.removeprefix("data: "))
        for choice in chunk["choices"]:
            tokens += choice.get("token_ids") or []
    return tokens


async def ask_every_way(cluster: Cluster, client: httpx.AsyncClient, prompt: Sequence[int], way: int) -> list[int]:
    """`way` 0..3: HTTP or gRPC, streaming or not."""
    fields = {"max_tokens": OUTPUT, "temperature": 0.0}
    if way < 2:
        return await http_tokens(client, prompt, stream=way == 0, **fields)
    if way == 2:
        return list((await cluster.generate(prompt, **fields)).tokens)
    request = generation_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=prompt), **fields)
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        whole = await generation_pb2_grpc.GenerationStub(channel).GenerateOnce(request, timeout=120)
    return list(whole.token_ids)


async def sampled(cluster: Cluster, prompt: Sequence[int], seed: int) -> list[int]:
    return list((await cluster.generate(prompt, seed=seed, **SAMPLED)).tokens)


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.http, timeout=120) as made:
        yield made


@pytest.fixture
async def cluster(request: pytest.FixtureRequest, models: dict[Family, Path], tmp_path: Path) -> AsyncIterator[Cluster]:
    family, setup = request.param
    made = Cluster(tmp_path, model=str(models[family]), dtype="float32", max_batched_tokens=256, **SETUPS[setup])
    async with made:
        yield made
        await made.wait_quiet()
    made.assert_clean()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("cluster", CASES, indirect=True, ids="-".join)
async def test_tokens_are_those_of_transformers(
    cluster: Cluster,
    client: httpx.AsyncClient,
    references: dict[Family, list[ClearPrompt]],
    drawn: dict[tuple[Family, int], list[int]],
    request: pytest.FixtureRequest,
) -> None:
    family, setup = request.node.callspec.params["cluster"]
    case = CASES.index((family, setup))
    prompts = references[family]
    for cached in (False, True):
        pairs = [(number, way) for way in range(4) for number in range(len(prompts))]
        if not cached:  # each prompt once while nobody has seen it: its way is another one in each case
            pairs = [(number, (number + case) % 4) for number in range(len(prompts))]
        answers = await asyncio.gather(
            *(ask_every_way(cluster, client, prompts[number].prompt, way) for number, way in pairs)
        )
        wrong = [
            (LENGTHS[number], way)
            for (number, way), answer in zip(pairs, answers, strict=True)
            if answer != list(prompts[number].answer)
        ]
        assert not wrong, f"cached: {cached}, (prompt length, way): {wrong}"
        await where_the_prompt_was_computed(client, cluster, setup, len(pairs) if cached else 0)
    await seeds_draw_the_same(cluster, prompts[4].prompt, family, drawn)


async def seeds_draw_the_same(
    cluster: Cluster, prompt: Sequence[int], family: Family, drawn: dict[tuple[Family, int], list[int]]
) -> None:
    """Alone first, then all at once; and over every transport, since `drawn` outlives the cluster."""
    alone = [await sampled(cluster, prompt, seed) for seed in SEEDS]
    together = await asyncio.gather(*(sampled(cluster, prompt, seed) for seed in SEEDS))
    assert alone == list(together)
    for seed, tokens in zip(SEEDS, alone, strict=True):
        assert drawn.setdefault((family, seed), tokens) == tokens
    assert len({tuple(tokens) for tokens in alone}) > 1


async def where_the_prompt_was_computed(client: httpx.AsyncClient, cluster: Cluster, setup: str, again: int) -> None:
    """By metric, each prompt token once. Cold, decode computes none but a lone first token: then the KV that it went
    on from was another process's."""
    metrics = (await client.get(f"{cluster.admin}/metrics")).text
    lines = [line for line in metrics.splitlines() if line.startswith("baton_prompt_tokens_total{")]
    tokens = {line.split('"')[1]: float(line.split()[-1]) for line in lines}
    passes = 1 + again // len(LENGTHS)
    assert sum(tokens.values()) == passes * sum(LENGTHS)
    if again:
        assert tokens["local_cache"] > 3 * sum(LENGTHS)
    elif setup == "auto":
        ways = [line for line in metrics.splitlines() if line.startswith("baton_placements_total{")]
        assert {re.findall(r'way="(\w+)"', line)[0] for line in ways} == {"local", "hand_off"}, "both were taken"
    elif setup != "colocated":
        assert tokens["computed_decode"] == 1
        assert tokens["computed_prefill"] > 0.95 * sum(LENGTHS)
        handed = [line for line in metrics.splitlines() if line.startswith("baton_handoffs_total{")]
        assert any(f'transport="{setup}"' in line and 'outcome="committed"' in line for line in handed)
