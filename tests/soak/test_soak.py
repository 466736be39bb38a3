"""Mixed load for a long time: every answer right, nothing held when it ends, and no process that grows.

`make test` runs a slice of a few seconds, `make soak` half an hour. `--soak-seed` repeats a run.
"""

import asyncio
import random
import time
from pathlib import Path

import pytest

from node_engine.paced import paced_reference
from tests.cluster import Cluster
from tests.processes import private_bytes

VOCABULARY = 1000
CLIENTS = 16
PREFIXES = 8  # that prompts share
SETTLED = 300.0  # seconds after which every bounded memory of a process has filled
GROWTH = 1 << 20  # bytes a minute


class Load:
    """What the clients ask: seeded, and the same for the same seed whatever the timing."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        source = random.Random(seed)
        self._prefixes = [[source.randrange(1, VOCABULARY) for _ in range(200)] for _ in range(PREFIXES)]
        self.answers = self.cancelled = 0

    async def client(self, cluster: Cluster, number: int, until: float) -> None:
        source = random.Random(f"{self._seed}/{number}")
        while time.monotonic() < until:
            prompt = source.choice(self._prefixes)[: source.choice((0, 16, 50, 128, 200))]
            prompt = prompt + [source.randrange(1, VOCABULARY) for _ in range(source.randrange(1, 120))]
            count = source.randrange(1, 40)
            if source.random() < 0.1:
                await self._cancel(cluster, prompt, count, after=source.randrange(0, count))
                continue
            answer = await cluster.generate(prompt, max_tokens=count, ignore_eos=True)
            assert list(answer.tokens) == paced_reference(prompt, count, VOCABULARY)
            assert answer.usage.prompt_tokens == len(prompt)
            self.answers += 1

    async def _cancel(self, cluster: Cluster, prompt: list[int], count: int, after: int) -> None:
        async with cluster.streaming(prompt, max_tokens=count, ignore_eos=True) as call:
            seen: list[int] = []
            while len(seen) < after:
                seen += (await call.read()).token_ids
            call.cancel()
        assert seen == paced_reference(prompt, len(seen), VOCABULARY)
        self.cancelled += 1


async def test_soak(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    seconds = float(request.config.getoption("--soak-seconds"))
    load = Load(int(request.config.getoption("--soak-seed")))
    paced = {"paced_vocab_size": VOCABULARY, "paced_prefill_us_per_token": 10, "paced_step_ms": 1}
    cluster = Cluster(tmp_path, engine="paced", prefill=2, decode=2, kv_memory="8MiB", **paced)
    async with cluster:
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(load.client(cluster, number, until))
            began = private_bytes(cluster.pids())
            if seconds > 2 * SETTLED:
                await asyncio.sleep(SETTLED)
                began = private_bytes(cluster.pids())
        await cluster.wait_quiet()
        grown = {name: size - began[name] for name, size in private_bytes(cluster.pids()).items()}
    cluster.assert_clean()
    assert load.answers > 0
    assert load.cancelled > 0
    if seconds > 2 * SETTLED:
        allowed = GROWTH * (seconds - SETTLED) / 60.0
        assert max(grown.values()) < allowed, grown
