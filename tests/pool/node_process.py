"""A node's pool client in a process of its own, so that it can be stopped and killed.

It reads one order a line and prints the result. Failpoints are set by environment variables."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from baton.kv.pool_types import PoolHit
from baton.process import log
from baton.process.failpoints import arm_from_environment
from tests.pool.harness import PoolNode, expected_blocks, make_tokens, run_pool_node


async def _main(address: str, folder: str, name: str) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async with run_pool_node(address, Path(folder), name) as node:
        await node.wait_until_attached()
        _reply("attached")
        hits: list[PoolHit] = []
        while line := await reader.readline():
            _reply(await _run_order(node, hits, json.loads(line)))


async def _run_order(node: PoolNode, hits: list[PoolHit], order: dict[str, Any]) -> object:
    tokens = make_tokens(order.get("seed", 0), order.get("blocks", 0))
    match order["do"]:
        case "publish":
            hit = await node.publish_tokens(tokens)
            if hit is not None:
                node.release_hit(hit)
            return len(hit.blocks) if hit is not None else None
        case "find":
            hits.append(await node.find_prefix(tokens))
            return len(hits[-1].blocks)
        case "read":
            return node.read_blocks(hits[-1]) == expected_blocks(tokens)[: len(hits[-1].blocks)]
        case "release":
            node.release_hit(hits.pop())
            return True
        case "attached":
            await node.wait_until_attached()
            return True
        case other:
            raise ValueError(other)


def _reply(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    log.configure_logging("warning", "json")
    arm_from_environment()
    asyncio.run(_main(*sys.argv[1:]))
