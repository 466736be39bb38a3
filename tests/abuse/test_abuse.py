"""Good traffic through a real cluster while others misbehave: hostile bodies, floods of connections, slow bodies and
readers, log sinks that block or fail, processes of a name that is taken, nodes of another model.

`make test` plays each attack for two seconds and judges outcomes, counts and memory; `make abuse` plays it for
`--abuse-seconds` and judges time too. The attackers run at the lowest priority on the same cores. Whoever behaves
gets its own tokens: prompts that are repeated have the answers that were recorded before.
"""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from baton.cli.default_model import default_model
from baton.pb.cluster_pb2 import StatusResponse
from tests.abuse.attacks import ATTACKS
from tests.abuse.good_traffic import GoodTraffic, Report
from tests.cluster import Cluster
from tests.processes import private_bytes
from tests.soak.conftest import Figures, figures

__all__ = ["figures"]
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

RATE = 4.0  # good requests a second
JUDGED = 20.0  # seconds of an attack from which on time is judged as well
ANSWERED = 0.95  # of good requests
SLOWER = 3.0  # times the idle p99 of the time to first token
REFUSAL = 1.0  # seconds
GROWTH = 384 << 20  # bytes that one process may take while bodies are in flight
SETTINGS = {"prefill": 1, "decode": 1, "dtype": "float32", "kv_memory": "64MiB", "pool_memory": "16MiB"}


class Scene:
    """One cluster with good traffic, and how it fared while nothing else ran."""

    def __init__(self, cluster: Cluster, seconds: float, figures: Figures) -> None:
        self.cluster = cluster
        self.seconds = seconds
        self.traffic = GoodTraffic(cluster.where.http, cluster.where.grpc)
        self._figures = figures
        self._idle: Report | None = None

    async def measure_idle(self) -> None:
        await self.traffic.record_answers()
        self._idle = await self.traffic.run(RATE, self.seconds)
        assert self._idle.answered_share == 1.0, self._idle.ends
        self._note("idle", self._idle, {})

    async def judge(self, name: str, report: Report, answers: Mapping[str, int]) -> None:
        """Whoever behaves is answered or refused, and the cluster is whole and at rest afterwards."""
        assert self._idle is not None
        self._note(name, report, answers)
        assert set(report.ends) <= {"answered", "refused"}, report.ends
        assert report.answered_share >= ANSWERED, report.ends
        await self.cluster.wait_quiet()
        if self.seconds < JUDGED:
            return
        slowest = report.ttft(0.99)
        assert slowest <= SLOWER * self._idle.ttft(0.99), f"{slowest} s, idle {self._idle.ttft(0.99)} s"
        assert max(report.refusal_seconds, default=0.0) <= REFUSAL, report.refusal_seconds

    def _note(self, name: str, report: Report, answers: Mapping[str, int]) -> None:
        ends = ", ".join(f"{count} {end}" for end, count in sorted(report.ends.items()))
        self._figures.append((name, "good requests", ends))
        quantiles = " / ".join(f"{report.ttft(share) * 1e3:.0f}" for share in (0.5, 0.95, 0.99))
        self._figures.append((name, "TTFT p50 / p95 / p99", f"{quantiles} ms"))
        if answers:
            told = ", ".join(f"{count} {answer}" for answer, count in sorted(answers.items()))
            self._figures.append((name, "attackers", told))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, figures: Figures
) -> AsyncIterator[Scene]:
    seconds = float(request.config.getoption("--abuse-seconds"))
    folder = tmp_path_factory.mktemp("abuse")
    impostor, stranger = str(_other_model(folder / "impostor")), str(_other_model(folder / "stranger"))
    async with Cluster(
        folder,
        model=str(default_model()),
        also={"same-name": "decode-0", "impostor": "decode-0", "stranger": "decode-0"},
        per_node={
            "same-name": {"name": "decode-0"},
            "impostor": {"name": "decode-0", "model": impostor},
            "stranger": {"model": stranger},
        },
        held_back=["same-name", "impostor", "stranger"],
        **SETTINGS,
    ) as cluster:
        made = Scene(cluster, seconds, figures)
        await made.measure_idle()
        yield made


@pytest.mark.parametrize("kind", ATTACKS)
async def test_clients_that_misbehave(scene: Scene, kind: str) -> None:
    cluster = scene.cluster
    pids, before, joins = cluster.pids(), private_bytes(cluster.pids()), await _members(cluster)
    attackers = await _start_attack(kind, cluster, scene.seconds)
    good = asyncio.create_task(scene.traffic.run(RATE, scene.seconds))
    largest = dict(before)
    while not good.done():
        await asyncio.wait({good}, timeout=0.25)
        now = private_bytes(cluster.pids())
        largest = {name: max(largest[name], now.get(name, 0)) for name in largest}
    report = await good
    output, _ = await attackers.communicate()
    assert attackers.returncode == 0
    answers: dict[str, int] = json.loads(output)
    await scene.judge(kind, report, answers)
    assert cluster.pids() == pids
    assert await _members(cluster) == joins, "a node was lost"
    growth = {name: largest[name] - before[name] for name in before}
    assert max(growth.values()) <= GROWTH, growth
    wrong = {answer: count for answer, count in answers.items() if answer.startswith("50") and answer != "503"}
    assert wrong == {}


@pytest.mark.parametrize("name", ["same-name", "impostor", "stranger"])
async def test_a_process_that_must_not_join(scene: Scene, name: str) -> None:
    """One of a name that is taken, with the same model and with other weights, and one of other weights alone."""
    cluster = scene.cluster
    pids, joins, before = cluster.pids(), await _members(cluster), _refusals(await cluster.status())
    cluster.start(name)
    try:
        refused = asyncio.create_task(_refused(cluster, before))
        report = await scene.traffic.run(RATE, scene.seconds)
        while not refused.done():
            report = Report([*report.outcomes, *(await scene.traffic.run(RATE, 1.0)).outcomes])
        await refused
        await scene.judge(f"process {name}", report, {})
    finally:
        if name in cluster.pids():
            cluster.kill(name)
    assert await _members(cluster) == joins, "a node was lost"
    assert cluster.pids() == pids


@pytest.mark.parametrize("sink", ["nobody reads", "full disk"])
async def test_logs_that_cannot_be_written(
    request: pytest.FixtureRequest, tmp_path: Path, figures: Figures, sink: str
) -> None:
    seconds = float(request.config.getoption("--abuse-seconds"))
    cluster = _WithoutLogs(tmp_path, full=sink == "full disk", model=str(default_model()), **SETTINGS)
    async with cluster:
        scene = Scene(cluster, seconds, figures)
        pids = cluster.pids()
        await scene.measure_idle()
        report = await scene.traffic.run(RATE, seconds)
        await scene.judge(f"logs: {sink}", report, {})
        assert cluster.pids() == pids
    cluster.assert_clean()


class _WithoutLogs(Cluster):
    """Its processes write to a pipe that is full and that nobody reads, or to a device that has no space."""

    def __init__(self, folder: Path, *, full: bool, **settings: object) -> None:
        super().__init__(folder, log_level="debug", **settings)
        self._sink = os.open("/dev/full", os.O_WRONLY) if full else _full_pipe()
        self.logs.target = lambda name: self._sink  # type: ignore[method-assign]


def _full_pipe() -> int:
    """The end to write to of a pipe that takes no byte more. The other end stays open, and is read by nobody."""
    _, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, bytes(4096))
    except BlockingIOError:
        os.set_blocking(write, True)
    return write


def _other_model(folder: Path) -> Path:
    """The bundled model with weights that give other tokens."""
    shutil.copytree(default_model(), folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor.flip(0).contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


async def _start_attack(kind: str, cluster: Cluster, seconds: float) -> asyncio.subprocess.Process:
    where = cluster.where
    addresses = {"http": where.http, "grpc": where.grpc, "admin": where.admin, "cluster": where.cluster}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.abuse.attacks", kind, f"{seconds:g}", json.dumps(addresses)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def _members(cluster: Cluster) -> dict[str, str]:
    """The incarnation of each node: one that was lost and came back has another."""
    return {node.name: node.incarnation for node in (await cluster.status()).nodes}


async def _refused(cluster: Cluster, before: float) -> None:
    """Wait until the coordinator has refused one join more."""
    await cluster.wait_status(lambda status: _refusals(status) > before)


def _refusals(status: StatusResponse) -> float:
    return float(status.counters.get('baton_joins_total{outcome="refused"}', 0.0))
