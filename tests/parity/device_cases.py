"""What tests of cuda_ipc ask of a cluster, on CPUs and on a GPU."""

from collections.abc import Sequence

import httpx2

from tests.cluster import Cluster
from tests.models import StablePrompt

LENGTHS = (1, 16, 17, 130, 257, 700)
OUTPUT_TOKENS = 24


async def check_tokens(cluster: Cluster, prompts: Sequence[StablePrompt]) -> None:
    """Each prompt, cold and with its prefix cached, continues as in transformers."""
    for _ in range(2):
        for stable in prompts:
            answer = await cluster.generate(
                list(stable.prompt), max_tokens=OUTPUT_TOKENS, temperature=0.0
            )
            assert list(answer.tokens) == list(stable.reference_tokens)


async def count_handoffs(cluster: Cluster) -> dict[tuple[str, str], float]:
    """Ended hand-offs by outcome and transport, without those that did not occur."""
    async with httpx2.AsyncClient() as http:
        lines = (await http.get(f"{cluster.admin_url}/metrics")).text.splitlines()
    found = {}
    for line in lines:
        if line.startswith("baton_handoffs_total{") and float(line.rpartition(" ")[2]):
            labels = line.split('"')
            found[labels[1], labels[3]] = float(line.rpartition(" ")[2])
    return found
