"""More than a small cluster can take: what is turned away is told so at once, what is taken in is answered right."""

import asyncio
from collections import Counter
from pathlib import Path

import httpx

from node_engine.paced import paced_reference
from tests.cluster import Cluster

CROWD = 40
OUTPUT = 8


async def test_a_crowd_is_answered_or_told_when_to_come_back(tmp_path: Path) -> None:
    prompts = [[1 + number] * 40 for number in range(CROWD)]
    settings = {"max_queue": 4, "max_num_seqs": 2, "paced_step_ms": 50.0}
    async with Cluster(tmp_path, engine="paced", model="", **settings) as cluster:
        async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as client:

            async def ask(prompt: list[int]) -> httpx.Response:
                body = {"prompt": prompt, "max_tokens": OUTPUT, "return_token_ids": True}
                return await client.post("/v1/completions", json=body)

            answers = await asyncio.gather(*map(ask, prompts))
            outcomes = Counter(answer.status_code for answer in answers)
            assert set(outcomes) == {200, 429}, outcomes
            for prompt, answer in zip(prompts, answers, strict=True):
                if answer.status_code == 200:
                    assert answer.json()["choices"][0]["token_ids"] == paced_reference(prompt, OUTPUT)
                else:
                    assert "the limit is 4 (--max-queue)" in answer.json()["error"]["message"]
                    assert int(answer.headers["retry-after"]) >= 1
            metrics = (await client.get(f"{cluster.admin}/metrics")).text
            assert f'baton_rejected_total{{class="default",reason="overloaded"}} {outcomes[429]}.0' in metrics
            await cluster.wait_quiet()
            assert (await ask(prompts[0])).status_code == 200
            await cluster.wait_quiet()
    cluster.assert_clean()
