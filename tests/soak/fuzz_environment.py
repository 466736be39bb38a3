"""What is fuzzed, on an event loop of its own in a thread: so a test may block, and good traffic
goes on beside it.

Two targets. `cluster` is a real one of paced nodes: processes, placement, hand-offs, and every
token known in advance. `front` is both front doors alone with a real tokenizer and chat template
over a scripted brain: what paced nodes, which know no text, cannot show.
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

from baton.types import TokenLogprobs
from coordinator.generation import PromptLogprobsEvent, TokensEvent
from tests import http_exchange
from tests.cluster import Cluster
from tests.integration.frontend.frontend_harness import (
    FakeGeneration,
    FrontendHarness,
    finished_event,
    running_frontend,
)
from tests.paced_reference import paced_reference_tokens
from tests.small_tokenizers import chat_tokenizer

VOCAB_SIZE = 300  # of both targets
CONTEXT_TOKENS = 128  # tokens of the cluster's model
CLIENTS = 4
SPARE_NODES = ("prefill-1", "decode-1")  # nodes that may be drained: the others carry on
_DEFECT_WORDS = ("internal error", "Traceback", "never retrieved", '"level":"critical"')


@dataclass(frozen=True)
class FuzzTarget:
    """Ports of one coordinator, and the name of its model."""

    name: str
    http: int
    admin: int
    grpc: str
    model: str
    has_operator_ports: bool  # baton.v1.Cluster, and an admin port that reports real nodes


class FuzzEnvironment:
    """A context that checks, on leaving, good traffic, held blocks, running tasks and the logs."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.cluster: FuzzTarget
        self.front: FuzzTarget
        self.good_answer_count = 0
        self._folder = folder
        self._seed = seed
        self._defects: list[str] = []
        self._ready: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._stop: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="fuzz environment")

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
        """Stop, and raise what was wrong. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._ended.result()

    def run_on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the environment's event loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def _run(self) -> None:
        try:
            asyncio.run(self._run_targets())
        except BaseException as error:
            self._ended.set_exception(error)
            if not self._ready.done():
                self._ready.set_exception(error)
        else:
            self._ended.set_result(None)

    async def _run_targets(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(lambda _, context: self._defects.append(str(context)))
        paced: dict[str, Any] = {
            "paced_vocab_size": VOCAB_SIZE,
            "paced_prefill_us_per_token": 10,
            "paced_step_ms": 2,
        }
        sizes: dict[str, Any] = {
            "max_model_len": CONTEXT_TOKENS,
            "kv_memory": "8MiB",
            "failpoints_rpc": False,
        }
        cluster = Cluster(self._folder, engine="paced", prefill=2, decode=2, **paced, **sizes)
        async with AsyncExitStack() as stack:
            front = await stack.enter_async_context(running_frontend(text=chat_tokenizer()))
            front.backend.script = _scripted_output
            await stack.enter_async_context(cluster)
            self.front = FuzzTarget(
                "front",
                front.http_port,
                front.admin_port,
                f"127.0.0.1:{front.grpc_port}",
                "demo",
                has_operator_ports=False,
            )
            self.cluster = FuzzTarget(
                "cluster",
                *_ports(cluster),
                cluster.grpc_address,
                await _get_model(cluster),
                has_operator_ports=True,
            )
            before, pids = len(asyncio.all_tasks()), cluster.get_pids()
            async with asyncio.TaskGroup() as clients:
                for number in range(CLIENTS):
                    clients.create_task(self._run_good_client(cluster, number))
                self._ready.set_result(None)
            await cluster.wait_idle()
            assert cluster.get_pids() == pids
            await _wait_idle(front, before)
        cluster.assert_clean()
        logs = {path.name: path.read_text() for path in sorted(cluster.logs.folder.glob("*.log"))}
        self._defects += [
            f"{name}: {line}"
            for name, log in logs.items()
            for line in log.splitlines()
            if _has_defect(line)
        ]
        assert self._defects == []
        assert self.good_answer_count > 0

    async def _run_good_client(self, cluster: Cluster, number: int) -> None:
        """Good traffic: by turns over HTTP and gRPC, streamed, and never anything but its own
        tokens."""
        source = random.Random(f"{self._seed}/{number}")
        for turn in itertools.count(number):
            if self._stop.is_set():
                return
            prompt = [source.randrange(VOCAB_SIZE) for _ in range(source.randrange(1, 80))]
            count = source.randrange(1, 40)
            ask = _generate_by_http if turn % 2 else _generate_by_grpc
            assert await ask(cluster, prompt, count) == paced_reference_tokens(
                prompt, count, VOCAB_SIZE
            )
            self.good_answer_count += 1


async def _generate_by_grpc(cluster: Cluster, prompt: list[int], count: int) -> list[int]:
    return list((await cluster.generate(prompt, max_tokens=count, ignore_eos=True)).tokens)


async def _generate_by_http(cluster: Cluster, prompt: list[int], count: int) -> list[int]:
    body = {
        "prompt": prompt,
        "max_tokens": count,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    host, _, port = cluster.endpoints.http.rpartition(":")
    tokens: list[int] = []
    async with http_exchange.post((host, int(port)), "/v1/completions", body, {}) as answer:
        assert answer.status == 200, await answer.read_body()
        lines = [line.removeprefix(b"data: ") async for line in answer.read_lines() if line]
    assert lines.pop() == b"[DONE]"
    for line in lines:
        tokens += json.loads(line)["choices"][0]["token_ids"]
    return tokens


def _scripted_output(generation: FakeGeneration) -> None:
    """The brain of `front`: at most 24 tokens, single bytes among them, with scores where they are
    asked for."""
    request, sampling = generation.request, generation.request.sampling
    if sampling.prompt_logprobs is not None:
        scores = [_score(token, sampling.prompt_logprobs) for token in request.prompt_token_ids[1:]]
        generation.emit_events(PromptLogprobsEvent(tuple(scores)))
    for step in range(min(sampling.max_tokens, 24)):
        token = (sampling.seed + 7 * step + request.choice_index) % VOCAB_SIZE
        generation.emit_events(
            TokensEvent(
                (token,), () if sampling.logprobs is None else (_score(token, sampling.logprobs),)
            ),
        )
    generation.emit_events(finished_event(cached=len(request.prompt_token_ids) // 2))


def _score(token: int, top: int) -> TokenLogprobs:
    ranked = tuple(((token + place) % VOCAB_SIZE, -0.1 * (place + 1)) for place in range(top))
    return TokenLogprobs(float("-inf") if token == 13 else -0.1, ranked)


async def _get_model(cluster: Cluster) -> str:
    return str((await cluster.get_status()).model)


def _ports(cluster: Cluster) -> tuple[int, int]:
    return int(cluster.endpoints.http.rpartition(":")[2]), int(
        cluster.endpoints.admin.rpartition(":")[2]
    )


async def _wait_idle(front: FrontendHarness, tasks: int) -> None:
    """Every generation has ended, and nothing runs for a connection."""
    async with asyncio.timeout(60):
        while len(asyncio.all_tasks()) > tasks:
            await asyncio.sleep(0.02)
    while not front.backend.generations.empty():
        assert front.backend.generations.get_nowait().is_ended


def _has_defect(line: str) -> bool:
    return any(word in line for word in _DEFECT_WORDS)
