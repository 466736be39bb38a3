"""Steady load on a cluster of paced nodes, every token of it checked, and the command line beside
it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.cluster import Cluster
from tests.grpc_calls import GenerateAnswer, GenerateCall, collect_answer
from tests.paced_reference import paced_reference_tokens


async def run_baton(cluster: Cluster, *arguments: str) -> tuple[int, str, str]:
    """The command line, as operators run it: exit code, standard output, standard error."""
    command = (sys.executable, "-m", "baton.cli", *arguments, "--endpoint", cluster.grpc_address)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(100):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def make_prompt(salt: int, length: int = 100) -> list[int]:
    return [salt + 1, *range(2, length + 1)]


@asynccontextmanager
async def steady_load(
    cluster: Cluster, streams: int = 6, tokens: int = 24
) -> AsyncIterator[list[GenerateAnswer]]:
    """Streams that each begin anew when they end. All have begun when the block does, and are not
    always all under way: between two of its answers a stream waits for this process. Afterwards
    every one has ended, and every token is right."""
    answers: list[GenerateAnswer] = []
    over, begun = asyncio.Event(), set[int]()

    async def noted(call: GenerateCall, number: int) -> GenerateCall:
        async for message in call:
            begun.add(number)
            yield message

    async def lane(number: int) -> None:
        turn = 0
        while not over.is_set():
            asked = make_prompt(1000 * number + turn)
            async with cluster.stream_generate(asked, max_tokens=tokens, ignore_eos=True) as call:
                answer = await collect_answer(noted(call, number))
            assert list(answer.tokens) == paced_reference_tokens(asked, tokens)
            answers.append(answer)
            turn += 1

    async with asyncio.TaskGroup() as lanes:
        for number in range(streams):
            lanes.create_task(lane(number))
        while len(begun) < streams:
            await asyncio.sleep(0.02)
        yield answers
        over.set()
