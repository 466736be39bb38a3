"""Tenants on real processes: who is let in, who goes first, what is kept apart, and how the file is
read again."""

import asyncio
import re
import signal
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2

from coordinator.core.admission.tenants import hash_key
from coordinator.frontend.tenants_file import DEFAULT_CLASSES as CLASSES
from coordinator.operators.metric_labels import list_known_labels
from tests.cluster import Cluster
from tests.promql.dashboard_coverage import (
    find_blank_queries,
    find_shared_names,
    find_unknown_selectors,
)

TENANTS_FILE = """
[[tenants]]
name = "gold"
class = "premium"
keys = ["sha256:{gold}"]

[[tenants]]
name = "bulk"
class = "standard"
keys = ["sha256:{bulk}"]
"""
LATE_TENANT = """
[[tenants]]
name = "late"
keys = ["sha256:{late}"]
requests_per_second = 0.01
"""


def write_tenants_file(path: Path, text: str) -> None:
    path.write_text(
        text.format(
            **{name: hash_key(f"key-of-{name}".encode()).hex() for name in ("gold", "bulk", "late")}
        )
    )


def key_header(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


async def test_tenant_classes_shares_and_cache_salts(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    write_tenants_file(tenants, TENANTS_FILE)
    settings: dict[str, Any] = {
        "tenants": str(tenants),
        "max_num_seqs": 4,
        "max_queue": 32,
        "paced_step_ms": 10.0,
    }
    async with Cluster(tmp_path, engine="paced", model="", **settings) as cluster:
        async with httpx2.AsyncClient(base_url=cluster.http_url, timeout=60) as client:

            async def ask(name: str, prompt: list[int], max_tokens: int = 8) -> httpx2.Response:
                body = {"prompt": prompt, "max_tokens": max_tokens}
                return await client.post("/v1/completions", json=body, headers=key_header(name))

            before = await get_metrics(cluster)
            assert (await client.post("/v1/completions", json={"prompt": [1]})).status_code == 401
            assert (await ask("late", [1, 2])).status_code == 401

            # equal prompts of two tenants share nothing, those of one do
            prompt = list(range(1, 65))
            cached = [
                (await ask(name, prompt)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                for name in ("gold", "bulk", "gold")
            ]
            assert cached[:2] == [0, 0]
            assert cached[2] > 0

            # a crowd of one class; the other one passes it, and takes no place from it
            order: list[str] = []

            async def run(name: str, number: int) -> int:
                answer = await ask(name, [number] * 40)
                if answer.status_code == 200:
                    order.append(name)
                return answer.status_code

            await cluster.arm_failpoints(
                "decode", "decode.step.before=delay(0.1)"
            )  # the queue is there when gold comes
            crowd = [asyncio.create_task(run("bulk", 100 + number)) for number in range(60)]
            while queue_length(await get_metrics(cluster)) < 8:
                await asyncio.sleep(0.02)
            first = await asyncio.gather(*(run("gold", 300 + number) for number in range(4)))
            assert first == [200] * 4
            await cluster.arm_failpoints("decode", "")
            ended = Counter(await asyncio.gather(*crowd))
            assert set(ended) == {200, 429}
            places = {
                name: [place for place, each in enumerate(order) if each == name]
                for name in ("gold", "bulk")
            }
            assert statistics.median(places["gold"]) < statistics.median(places["bulk"])

            seen = await get_metrics(cluster)
            assert (
                find_blank_queries(before, seen)
                == find_unknown_selectors(seen)
                == find_shared_names(seen)
                == []
            )
            assert find_unforeseen_labels((await cluster.get_status()).counters, CLASSES) == []
            assert 'baton_requests_total{class="premium",outcome="length"}' in seen
            assert (
                f'baton_rejected_total{{class="standard",reason="overloaded"}} {ended[429]}.0'
                in seen
            )
            seconds = metric_values(seen, "baton_device_seconds_total")
            busy = sum(metric_values(seen, "baton_device_busy_seconds_total"))
            assert busy > 0
            assert abs(sum(seconds) - busy) <= 0.02 * busy

            # read again, a good file and a bad one
            write_tenants_file(tenants, TENANTS_FILE + LATE_TENANT)
            cluster.send_signal("coordinator", signal.SIGHUP)
            while (await ask("late", [1, 2])).status_code == 401:
                await asyncio.sleep(0.02)
            limited = await ask("late", [1, 2])
            assert limited.status_code == 429
            assert int(limited.headers["retry-after"]) >= 1
            tenants.write_text("tenants = 5")
            cluster.send_signal("coordinator", signal.SIGHUP)
            while "reloading tenants failed" not in cluster.log_tail("coordinator"):
                await asyncio.sleep(0.02)
            assert (await ask("gold", [1, 2])).status_code == 200
            await cluster.wait_idle()
    cluster.assert_clean()


def find_unforeseen_labels(counters: Mapping[str, float], classes: Sequence[str]) -> list[str]:
    """What was counted under labels whose series were not exposed from the start."""
    known = {
        f"{name}{{{','.join(labels)}}}"
        for name, found in list_known_labels(classes).items()
        for labels in found
    }
    names = {each.partition("{")[0] for each in known}
    counted = [
        re.sub(r'\w+="([^"]*)"', r"\1", each)
        for each in counters
        if each.partition("{")[0] in names
    ]
    assert counted
    return [each for each in counted if each not in known]


async def get_metrics(cluster: Cluster) -> str:
    async with httpx2.AsyncClient() as client:
        return (await client.get(f"{cluster.admin_url}/metrics")).text


def metric_values(text: str, name: str) -> list[float]:
    return [
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name + "{")
    ]


def queue_length(text: str) -> float:
    line = next(
        line
        for line in text.splitlines()
        if line.startswith('baton_queue_depth{role="coordinator"}')
    )
    return float(line.rpartition(" ")[2])
