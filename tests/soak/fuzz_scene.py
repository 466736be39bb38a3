"""What is fuzzed, on an event loop of its own in a thread: so a test may block, and good traffic goes on beside it.

Two targets. `cluster` is a real one of paced nodes: processes, placement, hand-offs, and every token known in advance.
`front` is both front doors alone with a real tokenizer and chat template over a scripted brain: what paced nodes, which
know no text, cannot show.
"""

import asyncio
import itertools
import json
import random
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from baton.types import TokenScore
from coordinator.generation import Delta, PromptScores
from node_engine.paced import paced_reference
from tests import http_exchange
from tests.cluster import Cluster
from tests.integration.front_fixtures import FakeGeneration, Front, done, serving
from tests.integration.front_text import chatting_tokenizer

VOCABULARY = 300  # of both targets
CONTEXT = 128  # tokens of the cluster's model
CLIENTS = 4
SPARE = ("prefill-1", "decode-1")  # nodes that may be drained: the others carry on
_DEFECTS = ("internal error", "Traceback", "never retrieved", '"level":"critical"')


@dataclass(frozen=True)
class Target:
    """Ports of one coordinator, and the name of its model. `operated`: it has baton.v1.Cluster and an admin port that
    tells of real nodes."""

    name: str
    http: int
    admin: int
    grpc: str
    model: str
    operated: bool


class Scene:
    """As a context. Leaving it fails if good traffic got anything but its own tokens, if anything is held or runs
    then, or if a log tells of a defect."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.cluster: Target
        self.front: Target
        self.good_answers = 0
        self._folder = folder
        self._seed = seed
        self._defects: list[str] = []
        self._ready: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._stop: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="fuzz scene")

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._ready.result(110)
        except BaseException:
            self._thread.join()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._ended.result()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run it on the scene's loop, and wait."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:
            self._ended.set_exception(error)
            if not self._ready.done():
                self._ready.set_exception(error)
        else:
            self._ended.set_result(None)

    async def _live(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(lambda _, context: self._defects.append(str(context)))
        paced = {"paced_vocab_size": VOCABULARY, "paced_prefill_us_per_token": 10, "paced_step_ms": 2}
        sizes = {"max_model_len": CONTEXT, "kv_memory": "8MiB", "failpoints_rpc": False}
        cluster = Cluster(self._folder, engine="paced", prefill=2, decode=2, **paced, **sizes)
        async with AsyncExitStack() as stack:
            front = await stack.enter_async_context(serving(text=chatting_tokenizer()))
            front.brain.script = _tell
            await stack.enter_async_context(cluster)
            self.front = Target(
                "front", front.http_port, front.admin_port, f"127.0.0.1:{front.grpc_port}", "demo", operated=False
            )
            self.cluster = Target("cluster", *_ports(cluster), cluster.grpc, await _model(cluster), operated=True)
            before, pids = len(asyncio.all_tasks()), cluster.pids()
            async with asyncio.TaskGroup() as clients:
                for number in range(CLIENTS):
                    clients.create_task(self._client(cluster, number))
                self._ready.set_result(None)
            await cluster.wait_quiet()
            assert cluster.pids() == pids
            await _at_rest(front, before)
        cluster.assert_clean()
        logs = {path.name: path.read_text() for path in sorted(cluster.logs.folder.glob("*.log"))}
        self._defects += [f"{name}: {line}" for name, log in logs.items() for line in log.splitlines() if _tells(line)]
        assert self._defects == []
        assert self.good_answers > 0

    async def _client(self, cluster: Cluster, number: int) -> None:
        """Good traffic: by turns over HTTP and gRPC, streamed, and never anything but its own tokens."""
        source = random.Random(f"{self._seed}/{number}")
        for turn in itertools.count(number):
            if self._stop.is_set():
                return
            prompt = [source.randrange(VOCABULARY) for _ in range(source.randrange(1, 80))]
            count = source.randrange(1, 40)
            ask = _by_http if turn % 2 else _by_grpc
            assert await ask(cluster, prompt, count) == paced_reference(prompt, count, VOCABULARY)
            self.good_answers += 1


async def _by_grpc(cluster: Cluster, prompt: list[int], count: int) -> list[int]:
    return list((await cluster.generate(prompt, max_tokens=count, ignore_eos=True)).tokens)


async def _by_http(cluster: Cluster, prompt: list[int], count: int) -> list[int]:
    body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "stream": True, "return_token_ids": True}
    host, _, port = cluster.where.http.rpartition(":")
    tokens: list[int] = []
    async with http_exchange.post((host, int(port)), "/v1/completions", body, {}) as answer:
        assert answer.status == 200, await answer.body()
        lines = [line.removeprefix(b"data: ") async for line in answer.lines() if line]
    assert lines.pop() == b"[DONE]"
    for line in lines:
        tokens += json.loads(line)["choices"][0]["token_ids"]
    return tokens


def _tell(generation: FakeGeneration) -> None:
    """The brain of `front`: at most 24 tokens, single bytes among them, with scores where they are asked for."""
    submission, sampling = generation.submission, generation.submission.sampling
    if sampling.prompt_logprobs is not None:
        scores = [_score(token, sampling.prompt_logprobs) for token in submission.prompt[1:]]
        generation.give(PromptScores(tuple(scores)))
    for step in range(min(sampling.max_tokens, 24)):
        token = (sampling.seed + 7 * step + submission.choice) % VOCABULARY
        generation.give(
            Delta((token,), () if sampling.logprobs is None else (_score(token, sampling.logprobs),)),
        )
    generation.give(done(cached=len(submission.prompt) // 2))


def _score(token: int, top: int) -> TokenScore:
    ranked = tuple(((token + place) % VOCABULARY, -0.1 * (place + 1)) for place in range(top))
    return TokenScore(float("-inf") if token == 13 else -0.1, ranked)


async def _model(cluster: Cluster) -> str:
    return str((await cluster.status()).model)


def _ports(cluster: Cluster) -> tuple[int, int]:
    return int(cluster.where.http.rpartition(":")[2]), int(cluster.where.admin.rpartition(":")[2])


async def _at_rest(front: Front, tasks: int) -> None:
    """Every generation has ended, and nothing runs for a connection."""
    async with asyncio.timeout(60):
        while len(asyncio.all_tasks()) > tasks:
            await asyncio.sleep(0.02)
    while not front.brain.generations.empty():
        assert front.brain.generations.get_nowait().ended


def _tells(line: str) -> bool:
    return any(word in line for word in _DEFECTS)
