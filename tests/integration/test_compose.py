"""docker-compose.yml, run: every service of ours as a local process with its own command and environment, over each
transport, until a request is answered through the published door; then stopped as Compose stops it."""

import asyncio
import json
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import dockerfile
from tests.compose_file import dotenv, load
from tests.compose_run import ROOT, ComposeRun, Container
from tests.models import build_model
from tests.promql.shown import blank_queries, shared_names, unknown_selectors

BUNDLED = ROOT / "models" / "demo"
SECRETS = ("BATON_API_KEY", "BATON_CLUSTER_TOKEN", "BATON_ADMIN_TOKEN", "GRAFANA_PASSWORD")
DEFAULT_TRANSPORT = "zmq"
SMALL = {"BATON_DECODE": "2", "BATON_KV_MEMORY": "16MiB", "BATON_POOL_MEMORY": "16MiB", "BATON_THREADS": "1"}
CPU = {"coordinator-1", "pool-1", "prefill-1", "decode-1", "decode-2"}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the image has at its default path."""
    return BUNDLED if (BUNDLED / "config.json").exists() else build_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def volumes() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="baton-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


@asynccontextmanager
async def up(folder: Path, volumes: Path, model: Path, *profiles: str, **own: str) -> AsyncIterator[ComposeRun]:
    variables = {name: secrets.token_hex(32) for name in SECRETS} | SMALL | own
    target = "cuda" if "gpu" in profiles else "cpu"
    run = ComposeRun(
        load(ROOT / "docker-compose.yml", variables),
        *profiles,
        folder=folder,
        volumes=volumes,
        paths={"/opt/baton/models/demo": model},
        image=dockerfile.environ(ROOT / "deploy" / "Dockerfile", target),
    )
    try:
        run.start()
        await run.ready()
        yield run
    except BaseException:
        for container in run.containers:
            sys.stdout.write(f"{run.tail(container.name)}\n")
        raise
    finally:
        run.close()


class Doors:
    """The published ports, as a client of this machine sees them."""

    def __init__(self, coordinator: Container) -> None:
        self.environ = coordinator.environ
        self.http = f"http://127.0.0.1:{coordinator.port('8000')}"
        self.admin = f"http://127.0.0.1:{coordinator.port('9000')}"
        self.client = httpx.AsyncClient(timeout=100)

    async def complete(self, **fields: Any) -> httpx.Response:
        body = {"prompt": "def main():", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **fields}
        headers = bearer(self.environ["BATON_API_KEY"])
        return await self.client.post(f"{self.http}/v1/completions", json=body, headers=headers)

    async def admin_get(self, path: str) -> httpx.Response:
        headers = bearer(self.environ["BATON_ADMIN_TOKEN"])
        return await self.client.get(f"{self.admin}{path}", headers=headers)


async def serves(doors: Doors, transport: str) -> None:
    """Clients need the key and get an answer, which has come over the transport that was asked for."""
    assert (await doors.client.post(f"{doors.http}/v1/completions", json={"prompt": "x"})).status_code == 401
    assert (await doors.client.get(f"{doors.admin}/readyz")).status_code == 401
    answer = await doors.complete()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    handed_off = rf'baton_handoffs_total{{outcome="committed",transport="{transport}"}} [1-9]'
    async with asyncio.timeout(60):  # prefill's report of it may come after the answer
        while not re.search(handed_off, (await doors.admin_get("/metrics")).text):
            await asyncio.sleep(0.05)


def probes_pass(run: ComposeRun) -> None:
    for container in run.containers:
        result = run.probe(container)
        assert result.returncode == 0, f"{container.name}: {result.stderr}"


async def whoever_streams_is_served_to_the_end(run: ComposeRun, doors: Doors) -> dict[str, int]:
    """Stop everything while an answer is being written: it comes to its end."""
    body = {"prompt": "import os", "max_tokens": 240, "temperature": 0.0, "ignore_eos": True, "stream": True}
    headers = bearer(doors.environ["BATON_API_KEY"])
    async with doors.client.stream("POST", f"{doors.http}/v1/completions", json=body, headers=headers) as answer:
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: {")
        stopping = asyncio.create_task(run.stop())
        events = [line async for line in lines if line]
        codes = await stopping
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    return codes


async def test_up_serves_and_stops(tmp_path: Path, volumes: Path, model: Path) -> None:
    """As the file is, with nothing chosen but two decode nodes."""
    async with up(tmp_path, volumes, model) as run:
        assert {container.name for container in run.containers} == CPU
        doors = Doors(run.of("coordinator"))
        async with doors.client:
            before = (await doors.admin_get("/metrics")).text
            await serves(doors, DEFAULT_TRANSPORT)
            probes_pass(run)
            after = (await doors.admin_get("/metrics")).text
            assert blank_queries(before, after) == unknown_selectors(after) == shared_names(after) == []
            codes = await whoever_streams_is_served_to_the_end(run, doors)
        assert codes == dict.fromkeys(CPU, 0)
        assert run.probe(run.of("coordinator")).returncode == 3  # and whoever asks now hears it
    assert left_in(volumes) == left_in(run.cwd) == []


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_over_another_transport(tmp_path: Path, volumes: Path, model: Path, transport: str) -> None:
    async with up(tmp_path, volumes, model, BATON_TRANSPORT=transport, BATON_DECODE="1") as run:
        doors = Doors(run.of("coordinator"))
        async with doors.client:
            await serves(doors, transport)
        assert set((await run.stop()).values()) == {0}
    assert left_in(volumes) == left_in(run.cwd) == []


async def test_a_pool_without_prefill_nodes_is_colocated(tmp_path: Path, volumes: Path, model: Path) -> None:
    async with up(tmp_path, volumes, model, BATON_PREFILL="0", BATON_DECODE="1") as run:
        assert {container.name for container in run.containers} == {"coordinator-1", "pool-1", "decode-1"}
        doors = Doors(run.of("coordinator"))
        async with doors.client:
            assert (await doors.complete()).status_code == 200
        assert set((await run.stop()).values()) == {0}


@pytest.mark.gpu
async def test_the_gpu_profile_serves(tmp_path: Path, volumes: Path, model: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    pools_off = dotenv(ROOT / "deploy" / "gpu.env")
    async with up(tmp_path, volumes, model, "gpu", **pools_off, BATON_DECODE="1") as run:
        names = {container.name for container in run.containers}
        assert names == {"coordinator-1", "pool-1", "prefill-gpu-1", "decode-gpu-1"}
        doors = Doors(run.of("coordinator"))
        async with doors.client:
            await serves(doors, "zmq")
            probes_pass(run)
        assert set((await run.stop()).values()) == {0}
