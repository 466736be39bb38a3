"""Good traffic through a real cluster while others misbehave: hostile bodies, floods of
connections, slow bodies and readers, log sinks that block or fail, processes of a name that is
taken, nodes of another model.

`make test` runs each attack for a second and judges outcomes, counts and memory; `make abuse`
runs it for `--abuse-seconds` and judges time too. The attackers run at the lowest priority on the
same cores. Whoever behaves gets its own tokens: prompts that are repeated have the answers that
were recorded before.
"""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from baton.cli.common.default_model import find_default_model
from baton.pb.cluster_pb2 import StatusResponse
from tests.abuse.attacks import ATTACKS
from tests.abuse.good_traffic import GoodTraffic, TrafficReport
from tests.cluster import Cluster
from tests.processes import measure_private_bytes
from tests.soak.conftest import Figures, figures

__all__ = ["figures"]
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

REQUESTS_PER_SECOND = 4.0  # good requests a second
JUDGED_SECONDS = 20.0  # seconds of an attack from which on time is judged as well
MIN_ANSWERED_SHARE = 0.95  # of good requests, where time is judged
# Of good requests otherwise: they may be refused for want of time, so that a slow machine has more.
MIN_ANSWERED_SHARE_UNTIMED = 0.5
MAX_TTFT_RATIO = 3.0  # times the idle p99 of the time to first token
MAX_REFUSAL_SECONDS = 1.0  # seconds
MAX_GROWTH_BYTES = 384 << 20  # bytes that one process may take while bodies are in flight
SETTINGS: dict[str, Any] = {
    "prefill": 1,
    "decode": 1,
    "dtype": "float32",
    "kv_memory": "64MiB",
    "pool_memory": "16MiB",
}


class AbuseRun:
    """One cluster with well-behaved traffic, and its latency while nothing else ran."""

    def __init__(self, cluster: Cluster, seconds: float, figures: Figures) -> None:
        self.cluster = cluster
        self.seconds = seconds
        self.traffic = GoodTraffic(cluster.endpoints.http, cluster.endpoints.grpc)
        self._figures = figures
        self._idle_report: TrafficReport | None = None

    async def measure_idle(self) -> None:
        await self.traffic.record_answers()
        self._idle_report = await self.traffic.run(REQUESTS_PER_SECOND, self.seconds)
        assert self._idle_report.answered_share == 1.0, self._idle_report.result_counts
        self._record_figures("idle", self._idle_report, {})

    async def check_report(
        self, name: str, report: TrafficReport, answers: Mapping[str, int]
    ) -> None:
        """Well-behaved clients are answered or refused, and the cluster is idle afterwards."""
        assert self._idle_report is not None
        self._record_figures(name, report, answers)
        assert set(report.result_counts) <= {"answered", "refused"}, report.result_counts
        is_timed = self.seconds >= JUDGED_SECONDS
        least = MIN_ANSWERED_SHARE if is_timed else MIN_ANSWERED_SHARE_UNTIMED
        assert report.answered_share >= least, report.result_counts
        await self.cluster.wait_idle()
        if not is_timed:
            return
        slowest = report.ttft_quantile(0.99)
        assert slowest <= MAX_TTFT_RATIO * self._idle_report.ttft_quantile(0.99), (
            f"{slowest} s, idle {self._idle_report.ttft_quantile(0.99)} s"
        )
        assert max(report.refusal_seconds, default=0.0) <= MAX_REFUSAL_SECONDS, (
            report.refusal_seconds
        )

    def _record_figures(self, name: str, report: TrafficReport, answers: Mapping[str, int]) -> None:
        ends = ", ".join(f"{count} {end}" for end, count in sorted(report.result_counts.items()))
        self._figures.append((name, "good requests", ends))
        quantiles = " / ".join(
            f"{report.ttft_quantile(share) * 1e3:.0f}" for share in (0.5, 0.95, 0.99)
        )
        self._figures.append((name, "TTFT p50 / p95 / p99", f"{quantiles} ms"))
        if answers:
            told = ", ".join(f"{count} {answer}" for answer, count in sorted(answers.items()))
            self._figures.append((name, "attackers", told))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def abuse_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, figures: Figures
) -> AsyncIterator[AbuseRun]:
    seconds = float(request.config.getoption("--abuse-seconds"))
    folder = tmp_path_factory.mktemp("abuse")
    impostor, stranger = (
        str(_other_model(folder / "impostor")),
        str(_other_model(folder / "stranger")),
    )
    async with Cluster(
        folder,
        model=str(find_default_model()),
        also={"same-name": "decode-0", "impostor": "decode-0", "stranger": "decode-0"},
        per_node={
            "same-name": {"name": "decode-0"},
            "impostor": {"name": "decode-0", "model": impostor},
            "stranger": {"model": stranger},
        },
        held_back=["same-name", "impostor", "stranger"],
        **SETTINGS,
    ) as cluster:
        made = AbuseRun(cluster, seconds, figures)
        await made.measure_idle()
        yield made


@pytest.mark.parametrize("kind", ATTACKS)
async def test_good_traffic_is_served_during_an_attack(abuse_run: AbuseRun, kind: str) -> None:
    cluster = abuse_run.cluster
    pids, before, joins = (
        cluster.get_pids(),
        measure_private_bytes(cluster.get_pids()),
        await _incarnation_by_node(cluster),
    )
    attackers = await _start_attack(kind, cluster, abuse_run.seconds)
    good = asyncio.create_task(abuse_run.traffic.run(REQUESTS_PER_SECOND, abuse_run.seconds))
    largest = dict(before)
    while not good.done():
        await asyncio.wait({good}, timeout=0.25)
        now = measure_private_bytes(cluster.get_pids())
        largest = {name: max(largest[name], now.get(name, 0)) for name in largest}
    report = await good
    output, _ = await attackers.communicate()
    assert attackers.returncode == 0
    answers: dict[str, int] = json.loads(output)
    await abuse_run.check_report(kind, report, answers)
    assert cluster.get_pids() == pids
    assert await _incarnation_by_node(cluster) == joins, "a node was lost"
    growth = {name: largest[name] - before[name] for name in before}
    assert max(growth.values()) <= MAX_GROWTH_BYTES, growth
    wrong = {
        answer: count
        for answer, count in answers.items()
        if answer.startswith("50") and answer != "503"
    }
    assert wrong == {}


@pytest.mark.parametrize("name", ["same-name", "impostor", "stranger"])
async def test_good_traffic_is_served_while_a_join_is_refused(
    abuse_run: AbuseRun, name: str
) -> None:
    """The joining node has a name that is taken, with the same model or other weights, or a new
    name and other weights."""
    cluster = abuse_run.cluster
    pids, joins, before = (
        cluster.get_pids(),
        await _incarnation_by_node(cluster),
        _count_refusals(await cluster.get_status()),
    )
    cluster.start(name)
    try:
        refused = asyncio.create_task(_wait_join_refused(cluster, before))
        report = await abuse_run.traffic.run(REQUESTS_PER_SECOND, abuse_run.seconds)
        while not refused.done():
            report = TrafficReport(
                [
                    *report.outcomes,
                    *(await abuse_run.traffic.run(REQUESTS_PER_SECOND, 1.0)).outcomes,
                ]
            )
        await refused
        await abuse_run.check_report(f"process {name}", report, {})
    finally:
        if name in cluster.get_pids():
            cluster.kill(name)
    assert await _incarnation_by_node(cluster) == joins, "a node was lost"
    assert cluster.get_pids() == pids


@pytest.mark.parametrize("sink", ["nobody reads", "full disk"])
async def test_good_traffic_is_served_when_logs_cannot_be_written(
    request: pytest.FixtureRequest, tmp_path: Path, figures: Figures, sink: str
) -> None:
    seconds = float(request.config.getoption("--abuse-seconds"))
    cluster = _ClusterWithoutLogs(
        tmp_path, full=sink == "full disk", model=str(find_default_model()), **SETTINGS
    )
    async with cluster:
        abuse_run = AbuseRun(cluster, seconds, figures)
        pids = cluster.get_pids()
        await abuse_run.measure_idle()
        report = await abuse_run.traffic.run(REQUESTS_PER_SECOND, seconds)
        await abuse_run.check_report(f"logs: {sink}", report, {})
        assert cluster.get_pids() == pids
    cluster.assert_clean()


class _ClusterWithoutLogs(Cluster):
    """Its processes log to a full pipe that nobody reads, or to a device without space."""

    def __init__(self, folder: Path, *, full: bool, **settings: Any) -> None:
        super().__init__(folder, log_level="debug", **settings)
        self._sink = os.open("/dev/full", os.O_WRONLY) if full else _full_pipe()
        self.logs.open_log = lambda name: self._sink  # type: ignore[method-assign]


def _full_pipe() -> int:
    """Return the writing end of a full pipe. The other end stays open, and nobody reads it."""
    _, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, bytes(4096))
    except BlockingIOError:
        os.set_blocking(write, True)
    return write


def _other_model(folder: Path) -> Path:
    """Return the bundled model with weights that give other tokens."""
    shutil.copytree(find_default_model(), folder)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor.flip(0).contiguous() for name, tensor in weights.items()},
        folder / "model.safetensors",
    )
    return folder


async def _start_attack(kind: str, cluster: Cluster, seconds: float) -> asyncio.subprocess.Process:
    where = cluster.endpoints
    addresses = {
        "http": where.http,
        "grpc": where.grpc,
        "admin": where.admin,
        "cluster": where.cluster,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.abuse.attacks", kind, f"{seconds:g}", json.dumps(addresses)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def _incarnation_by_node(cluster: Cluster) -> dict[str, str]:
    """Return the incarnation of each node; a node that was lost and rejoined has a new one."""
    return {node.name: node.incarnation for node in (await cluster.get_status()).nodes}


async def _wait_join_refused(cluster: Cluster, before: float) -> None:
    """Wait until the coordinator has refused one join more."""
    await cluster.wait_status(lambda status: _count_refusals(status) > before)


def _count_refusals(status: StatusResponse) -> float:
    return float(status.counters.get('baton_joins_total{outcome="refused"}', 0.0))
