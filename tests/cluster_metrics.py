"""What a cluster's metrics say."""

import asyncio
import re

import httpx2

from tests.cluster import Cluster


async def read_metric(cluster: Cluster, name: str) -> float:
    async with httpx2.AsyncClient() as client:
        text = (await client.get(f"{cluster.admin_url}/metrics")).text
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def wait_known_blocks(cluster: Cluster, at_least: float) -> None:
    """Until the directory has been told of so many."""
    async with asyncio.timeout(30):
        while await read_metric(cluster, "baton_prefix_directory_blocks") < at_least:
            await asyncio.sleep(0.05)
