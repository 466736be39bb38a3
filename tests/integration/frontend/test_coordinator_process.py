"""The coordinator as a process of its own: where it listens, what it refuses to start with, how it
ends."""

import asyncio
import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.config.settings import Config
from baton.errors import ConfigError
from coordinator.assemble import Coordinator
from coordinator.text import tokenizer_loader

ROOT = Path(__file__).resolve().parents[3]
NO_PORTS = Config(port=0, grpc_port=0, admin_port=0, cluster_port=0)
ANY_PORT = (
    "--port",
    "0",
    "--grpc-port",
    "0",
    "--admin-port",
    "0",
    "--cluster-port",
    "0",
    "--engine",
    "paced",
)


async def start_coordinator(*flags: str) -> asyncio.subprocess.Process:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "coordinator", *ANY_PORT, *flags),
        cwd=ROOT,
        env=environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@asynccontextmanager
async def running_process(
    folder: Path, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    process = await start_coordinator("--state-dir", str(folder), *flags)
    try:
        async with asyncio.timeout(60):
            assert process.stderr is not None
            while b"listening" not in await process.stderr.readline():
                assert process.returncode is None
        yield process, json.loads((folder / "coordinator.json").read_text())
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_coordinator_starts_without_nodes(tmp_path: Path) -> None:
    async with running_process(tmp_path) as (process, where):
        assert where["pid"] == process.pid
        async with (
            httpx2.AsyncClient(timeout=30) as http,
            grpc.aio.insecure_channel(where["grpc"]) as channel,
        ):
            health = health_pb2_grpc.HealthStub(channel)
            served = await http.post(f"http://{where['http']}/v1/completions", json={"prompt": [1]})
            assert (served.status_code, served.headers["retry-after"]) == (503, "1")
            assert (await http.get(f"http://{where['http']}/health")).status_code == 503
            assert (await http.get(f"http://{where['admin']}/livez")).status_code == 200
            assert (await http.get(f"http://{where['admin']}/readyz")).status_code == 503
            assert (await http.get(f"http://{where['admin']}/admin/status")).json()[
                "ready"
            ] is False
            assert (
                "baton_rejected_total" in (await http.get(f"http://{where['admin']}/metrics")).text
            )
            state = await health.Check(health_pb2.HealthCheckRequest(service="baton.v1.Generation"))
            assert state.status == health_pb2.HealthCheckResponse.NOT_SERVING
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
        assert not (tmp_path / "coordinator.json").exists()


async def test_unknown_fields_are_counted_in_metrics(tmp_path: Path) -> None:
    flags = ("--unknown-fields", "ignore", "--metrics-on-http")
    async with (
        running_process(tmp_path, *flags) as (_, where),
        httpx2.AsyncClient(timeout=30) as http,
    ):
        base = f"http://{where['http']}"
        body = {"prompt": [1], "colour": "red"}
        assert (
            await http.post(f"{base}/v1/completions", json=body)
        ).status_code == 503  # no node has joined
        for page in (f"{base}/metrics", f"http://{where['admin']}/metrics"):
            assert "\nbaton_ignored_fields_total 1.0\n" in (await http.get(page)).text
        refusing = await http.post(f"{base}/v1/completions", json=body | {"top_k": "x"})
        assert refusing.status_code == 400


async def startup_error(*flags: str) -> str:
    process = await start_coordinator(*flags)
    async with asyncio.timeout(60):
        _, complaint = await process.communicate()
    assert process.returncode == 2
    return complaint.decode().splitlines()[-1]


async def test_invalid_settings_prevent_startup() -> None:
    exposed, bad = await asyncio.gather(
        startup_error("--host", "0.0.0.0"), startup_error("--set", "max_queue=0")
    )
    assert exposed.startswith(
        "error: --host 0.0.0.0 can be reached from other hosts and --api-key is not set"
    )
    assert bad.startswith("error: max_queue is '0'")


@pytest.mark.parametrize("field", ["port", "grpc_port", "admin_port", "cluster_port"])
async def test_a_port_in_use_is_named(field: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            Coordinator(dataclasses.replace(NO_PORTS, **{field: port}))
    assert str(caught.value).startswith(f"cannot listen on 127.0.0.1:{port}")
    assert f"--{field.replace('_', '-')}" in str(caught.value)


async def test_a_tokenizer_that_cannot_be_used_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def load(model: str, engine: str, workers: object) -> None:
        raise ConfigError("the tokenizer of x cannot be loaded")

    monkeypatch.setattr(tokenizer_loader, "load_tokenizer", load)
    with pytest.raises(ExceptionGroup) as caught:
        await Coordinator(NO_PORTS).run(asyncio.Event())
    assert caught.value.subgroup(ConfigError) is not None
