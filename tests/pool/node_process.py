"""A node's client in a process of its own, so that it can be stopped and killed. It reads one order a line, and says
what became of it. Failpoints come by environment."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from baton import log
from baton.failpoints import arm_from_environment
from baton.pool_terms import PoolHit
from tests.pool.rig import Node, expected, node, tokens_of


async def _main(address: str, folder: str, name: str) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with node(address, Path(folder), name) as made:
        await made.attached()
        _say("attached")
        hits: list[PoolHit] = []
        while line := await reader.readline():
            _say(await _obey(made, hits, json.loads(line)))


async def _obey(made: Node, hits: list[PoolHit], order: dict[str, Any]) -> object:
    tokens = tokens_of(order.get("seed", 0), order.get("blocks", 0))
    match order["do"]:
        case "publish":
            hit = await made.publish(tokens)
            if hit is not None:
                made.release(hit)
            return len(hit.blocks) if hit is not None else None
        case "find":
            hits.append(await made.find(tokens))
            return len(hits[-1].blocks)
        case "read":
            return made.read(hits[-1]) == expected(tokens)[: len(hits[-1].blocks)]
        case "release":
            made.release(hits.pop())
            return True
        case "attached":
            await made.attached()
            return True
        case other:
            raise ValueError(other)


def _say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    log.configure("warning", "json")
    arm_from_environment()
    asyncio.run(_main(*sys.argv[1:]))
