"""Steady load on a cluster of paced nodes, every token of it checked, and the command line beside it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from node_engine.paced import paced_reference
from tests.answers import Answer
from tests.cluster import Cluster


async def baton(cluster: Cluster, *arguments: str) -> tuple[int, str, str]:
    """The command line, as operators run it: exit code, standard output, standard error."""
    command = (sys.executable, "-m", "baton.cli", *arguments, "--endpoint", cluster.grpc)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def prompt(salt: int, length: int = 100) -> list[int]:
    return [salt + 1, *range(2, length + 1)]


@asynccontextmanager
async def load(cluster: Cluster, streams: int = 6, tokens: int = 24) -> AsyncIterator[list[Answer]]:
    """Streams that each begin anew when they end. Afterwards every one has ended, and every token is right."""
    answers: list[Answer] = []
    over = asyncio.Event()

    async def lane(number: int) -> None:
        turn = 0
        while not over.is_set():
            asked = prompt(1000 * number + turn)
            answer = await cluster.generate(asked, max_tokens=tokens, ignore_eos=True, deadline=30.0)
            assert list(answer.tokens) == paced_reference(asked, tokens)
            answers.append(answer)
            turn += 1

    async with asyncio.TaskGroup() as lanes:
        for number in range(streams):
            lanes.create_task(lane(number))
        await cluster.wait_status(lambda status: status.running >= streams)
        yield answers
        over.set()
