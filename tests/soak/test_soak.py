"""Mixed load for a long time: every answer right, nothing held when it ends, and no process that
grows.

`make test` runs a slice of a few seconds, `make soak` half an hour. `--soak-seed` repeats a run.
"""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.paced_reference import paced_reference_tokens
from tests.processes import measure_private_bytes

VOCAB_SIZE = 1000
CLIENTS = 16
PREFIXES = 8  # that prompts share
SETTLED_SECONDS = 300.0  # seconds after which every bounded memory of a process has filled
MAX_GROWTH_BYTES_PER_MINUTE = 1 << 20  # bytes a minute


class SoakLoad:
    """What the clients send: seeded, and independent of timing."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        source = random.Random(seed)
        self._prefixes = [
            [source.randrange(1, VOCAB_SIZE) for _ in range(200)] for _ in range(PREFIXES)
        ]
        self.answer_count = self.cancelled_count = 0

    async def run_client(self, cluster: Cluster, number: int, until: float) -> None:
        source = random.Random(f"{self._seed}/{number}")
        while time.monotonic() < until:
            prompt = source.choice(self._prefixes)[: source.choice((0, 16, 50, 128, 200))]
            prompt = prompt + [
                source.randrange(1, VOCAB_SIZE) for _ in range(source.randrange(1, 120))
            ]
            count = source.randrange(1, 40)
            if source.random() < 0.1:
                await self._cancel(cluster, prompt, count, after=source.randrange(0, count))
                continue
            answer = await cluster.generate(prompt, max_tokens=count, ignore_eos=True)
            assert list(answer.tokens) == paced_reference_tokens(prompt, count, VOCAB_SIZE)
            assert answer.usage.prompt_tokens == len(prompt)
            self.answer_count += 1

    async def _cancel(self, cluster: Cluster, prompt: list[int], count: int, after: int) -> None:
        async with cluster.stream_generate(prompt, max_tokens=count, ignore_eos=True) as call:
            seen: list[int] = []
            while len(seen) < after:
                seen += (await call.read()).token_ids
            call.cancel()
        assert seen == paced_reference_tokens(prompt, len(seen), VOCAB_SIZE)
        self.cancelled_count += 1


async def test_mixed_load_gets_right_answers_without_growth(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    seconds = float(request.config.getoption("--soak-seconds"))
    load = SoakLoad(int(request.config.getoption("--soak-seed")))
    paced: dict[str, Any] = {
        "paced_vocab_size": VOCAB_SIZE,
        "paced_prefill_us_per_token": 10,
        "paced_step_ms": 1,
    }
    cluster = Cluster(tmp_path, engine="paced", prefill=2, decode=2, kv_memory="8MiB", **paced)
    async with cluster:
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(load.run_client(cluster, number, until))
            began = measure_private_bytes(cluster.get_pids())
            if seconds > 2 * SETTLED_SECONDS:
                await asyncio.sleep(SETTLED_SECONDS)
                began = measure_private_bytes(cluster.get_pids())
        await cluster.wait_idle()
        grown = {
            name: size - began[name]
            for name, size in measure_private_bytes(cluster.get_pids()).items()
        }
    cluster.assert_clean()
    assert load.answer_count > 0
    assert load.cancelled_count > 0
    if seconds > 2 * SETTLED_SECONDS:
        allowed = MAX_GROWTH_BYTES_PER_MINUTE * (seconds - SETTLED_SECONDS) / 60.0
        assert max(grown.values()) < allowed, grown
