"""The first token is drawn on another node than the rest: it may end the request, and none is lost
or doubled."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.paced_reference import paced_reference_tokens

VOCAB_SIZE = 1000


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = random.Random(5)
    return [[source.randrange(1, VOCAB_SIZE) for _ in range(length)] for length in range(3, 83)]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    settings: dict[str, Any] = {
        "paced_vocab_size": VOCAB_SIZE,
        "paced_prefill_us_per_token": 5,
        "paced_step_ms": 0.5,
    }
    made = Cluster(tmp_path, engine="paced", **settings)
    async with made:
        yield made
        await made.wait_idle()
    made.assert_clean()


async def test_first_token_is_neither_lost_nor_doubled(
    cluster: Cluster, prompts: list[list[int]]
) -> None:
    expected = [paced_reference_tokens(prompt, 4, VOCAB_SIZE) for prompt in prompts]
    for count in (1, 2, 3):
        answers = await asyncio.gather(
            *(cluster.generate(prompt, max_tokens=count, ignore_eos=True) for prompt in prompts)
        )
        assert [list(answer.tokens) for answer in answers] == [
            tokens[:count] for tokens in expected
        ]
        assert {answer.finish_reason for answer in answers} == {"length"}
        assert {answer.usage.completion_tokens for answer in answers} == {count}
    await check_first_token_stops(cluster, prompts, expected)
    status = await cluster.get_status()
    replaced = {
        name: value
        for name, value in status.counters.items()
        if name.startswith("baton_replaced_total")
    }
    assert sum(replaced.values()) == 0, replaced


async def check_first_token_stops(
    cluster: Cluster, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """A stop token as the first one: prefill answers, and decode's part ends without a word."""
    fresh = [[7, *prompt] for prompt in prompts]
    first = [paced_reference_tokens(prompt, 1, VOCAB_SIZE) for prompt in fresh]
    answers = await asyncio.gather(
        *(
            cluster.generate(prompt, max_tokens=10, ignore_eos=True, stop_token_ids=token)
            for prompt, token in zip(fresh, first, strict=True)
        )
    )
    assert [list(answer.tokens) for answer in answers] == first
    assert {answer.finish_reason for answer in answers} == {"stop"}
