"""docker-compose.yml, run: every service of ours as a local process with its own command and
environment, over each transport, until a request is answered through the published door; then
stopped as Compose stops it."""

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

import httpx2
import pytest

from tests import dockerfile
from tests.compose_file import load_compose_file, read_dotenv
from tests.compose_run import ROOT, ComposeRun, ServiceProcess
from tests.models import build_model
from tests.promql.dashboard_coverage import (
    find_blank_queries,
    find_shared_names,
    find_unknown_selectors,
)

BUNDLED = ROOT / "models" / "demo"
SECRETS = ("BATON_API_KEY", "BATON_CLUSTER_TOKEN", "BATON_ADMIN_TOKEN", "GRAFANA_PASSWORD")
DEFAULT_TRANSPORT = "zmq"
SMALL_SETTINGS = {
    "BATON_DECODE": "2",
    "BATON_KV_MEMORY": "16MiB",
    "BATON_POOL_MEMORY": "16MiB",
    "BATON_THREADS": "1",
}
CPU_PROCESSES = {"coordinator-1", "pool-1", "prefill-1", "decode-1", "decode-2"}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the image has at its default path."""
    return (
        BUNDLED
        if (BUNDLED / "config.json").exists()
        else build_model("llama", tmp_path_factory.mktemp("models"))
    )


@pytest.fixture
def volumes() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="baton-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def list_files_left(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


@asynccontextmanager
async def compose_up(
    folder: Path,
    volumes: Path,
    model: Path,
    *profiles: str,
    is_forked: bool = False,
    **own: str,
) -> AsyncIterator[ComposeRun]:
    variables = {name: secrets.token_hex(32) for name in SECRETS} | SMALL_SETTINGS | own
    target = "cuda" if "gpu" in profiles else "cpu"
    run = ComposeRun(
        load_compose_file(ROOT / "docker-compose.yml", variables),
        *profiles,
        folder=folder,
        volumes=volumes,
        paths={"/opt/baton/models/demo": model},
        image=dockerfile.image_environ(ROOT / "deploy" / "Dockerfile", target),
        is_forked=is_forked,
    )
    try:
        run.start()
        await run.wait_ready()
        yield run
    except BaseException:
        for container in run.processes:
            sys.stdout.write(f"{run.log_tail(container.name)}\n")
        raise
    finally:
        run.close()


class ComposeClient:
    """The published ports, as a client of this machine sees them."""

    def __init__(self, coordinator: ServiceProcess) -> None:
        self.environ = coordinator.environ
        self.http = f"http://127.0.0.1:{coordinator.host_port('8000')}"
        self.admin = f"http://127.0.0.1:{coordinator.host_port('9000')}"
        self.client = httpx2.AsyncClient(timeout=100)

    async def complete(self, **fields: Any) -> httpx2.Response:
        body = {
            "prompt": "def main():",
            "max_tokens": 8,
            "temperature": 0.0,
            "ignore_eos": True,
            **fields,
        }
        headers = bearer(self.environ["BATON_API_KEY"])
        return await self.client.post(f"{self.http}/v1/completions", json=body, headers=headers)

    async def get_admin(self, path: str) -> httpx2.Response:
        headers = bearer(self.environ["BATON_ADMIN_TOKEN"])
        return await self.client.get(f"{self.admin}{path}", headers=headers)


async def check_serving(doors: ComposeClient, transport: str) -> None:
    """Clients need the key and get an answer, which has come over the transport that was asked
    for."""
    assert (
        await doors.client.post(f"{doors.http}/v1/completions", json={"prompt": "x"})
    ).status_code == 401
    assert (await doors.client.get(f"{doors.admin}/readyz")).status_code == 401
    answer = await doors.complete()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    handed_off = rf'baton_handoffs_total{{outcome="committed",transport="{transport}"}} [1-9]'
    async with asyncio.timeout(60):  # prefill's report of it may come after the answer
        while not re.search(handed_off, (await doors.get_admin("/metrics")).text):
            await asyncio.sleep(0.05)


def check_healthchecks(run: ComposeRun) -> None:
    for container in run.processes:
        result = run.run_healthcheck(container)
        assert result.returncode == 0, f"{container.name}: {result.stderr}"


async def check_streams_finish_on_stop(run: ComposeRun, doors: ComposeClient) -> dict[str, int]:
    """Stop everything while an answer is being written: it comes to its end."""
    body = {
        "prompt": "import os",
        "max_tokens": 240,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    headers = bearer(doors.environ["BATON_API_KEY"])
    async with doors.client.stream(
        "POST", f"{doors.http}/v1/completions", json=body, headers=headers
    ) as answer:
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: {")
        stopping = asyncio.create_task(run.stop())
        events = [line async for line in lines if line]
        codes = await stopping
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    return codes


async def test_compose_up_serves_and_stops(tmp_path: Path, volumes: Path, model: Path) -> None:
    """As the file is, with nothing chosen but two decode nodes."""
    async with compose_up(tmp_path, volumes, model) as run:
        assert {container.name for container in run.processes} == CPU_PROCESSES
        doors = ComposeClient(run.get_process("coordinator"))
        async with doors.client:
            before = (await doors.get_admin("/metrics")).text
            await check_serving(doors, DEFAULT_TRANSPORT)
            check_healthchecks(run)
            after = (await doors.get_admin("/metrics")).text
            assert (
                find_blank_queries(before, after)
                == find_unknown_selectors(after)
                == find_shared_names(after)
                == []
            )
            codes = await check_streams_finish_on_stop(run, doors)
        assert codes == dict.fromkeys(CPU_PROCESSES, 0)
        assert (
            run.run_healthcheck(run.get_process("coordinator")).returncode == 3
        )  # and whoever asks now hears it
    assert list_files_left(volumes) == list_files_left(run.cwd) == []


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_compose_serves_over_another_transport(
    tmp_path: Path, volumes: Path, model: Path, transport: str
) -> None:
    async with compose_up(
        tmp_path, volumes, model, is_forked=True, BATON_TRANSPORT=transport, BATON_DECODE="1"
    ) as run:
        doors = ComposeClient(run.get_process("coordinator"))
        async with doors.client:
            await check_serving(doors, transport)
        assert set((await run.stop()).values()) == {0}
    assert list_files_left(volumes) == list_files_left(run.cwd) == []


async def test_compose_without_prefill_nodes_serves_colocated(
    tmp_path: Path, volumes: Path, model: Path
) -> None:
    async with compose_up(
        tmp_path, volumes, model, is_forked=True, BATON_PREFILL="0", BATON_DECODE="1"
    ) as run:
        assert {container.name for container in run.processes} == {
            "coordinator-1",
            "pool-1",
            "decode-1",
        }
        doors = ComposeClient(run.get_process("coordinator"))
        async with doors.client:
            assert (await doors.complete()).status_code == 200
        assert set((await run.stop()).values()) == {0}


@pytest.mark.gpu
async def test_the_gpu_profile_serves(tmp_path: Path, volumes: Path, model: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    pools_off = read_dotenv(ROOT / "deploy" / "gpu.env")
    own = {**pools_off, "BATON_DECODE": "1"}
    async with compose_up(tmp_path, volumes, model, "gpu", is_forked=False, **own) as run:
        names = {container.name for container in run.processes}
        assert names == {"coordinator-1", "pool-1", "prefill-gpu-1", "decode-gpu-1"}
        doors = ComposeClient(run.get_process("coordinator"))
        async with doors.client:
            await check_serving(doors, "zmq")
            check_healthchecks(run)
        assert set((await run.stop()).values()) == {0}
