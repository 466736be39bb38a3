"""Nodes report the device that they compute on: status and metrics have it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client import generate_latest

from baton.config.settings import Config
from baton.models.model_identity import ModelIdentity
from baton.types import NodeName, Role
from node_engine.core.step.engine import ComputeDevice, DeviceMemory, ModelSize
from node_engine.host import assemble
from node_engine.paced.paced_engine import PacedEngine
from tests.cluster import Cluster
from tests.integration.coordinator_harness import CoordinatorHarness, running_coordinator
from tests.models import build_model

GIB = 1 << 30


@pytest.mark.parametrize("engine", ["paced", "model"])
async def test_nodes_on_cpus(tmp_path: Path, engine: str) -> None:
    settings: dict[str, Any] = {"engine": engine, "device": "cpu", "heartbeat": 0.1}
    settings["model"] = "" if engine == "paced" else str(build_model("llama", tmp_path))
    async with Cluster(tmp_path, **settings) as cluster:
        await cluster.generate([5, 6, 7, 8], max_tokens=4)
        status = await cluster.wait_status(
            lambda status: all(
                node.stats.HasField("device") for node in status.nodes if node.role != "pool"
            )
        )
        async with httpx2.AsyncClient() as client:
            metrics = (await client.get(f"{cluster.admin_url}/metrics")).text
    cluster.assert_clean()
    nodes = [node for node in status.nodes if node.role != "pool"]
    assert {node.role for node in nodes} == {"prefill", "decode"}
    for node in nodes:
        device = node.stats.device
        assert (device.device, device.threads > 0) == ("cpu", True)
        assert 0 < device.memory_used_bytes < device.memory_total_bytes
        assert not device.HasField("mfu")
        assert not device.HasField("mbu")
        assert f'baton_device_info{{device="cpu",name="{device.name}",node="{node.name}"' in metrics
        assert f'baton_device_memory_bytes{{node="{node.name}"}}' in metrics
    assert not any(node.stats.HasField("device") for node in status.nodes if node.role == "pool")
    assert "# TYPE baton_mfu gauge" in metrics
    assert "baton_mfu{" not in metrics
    assert "baton_mbu{" not in metrics


class FakeGpuEngine(PacedEngine):
    """A paced engine that says it runs a bfloat16 model on an H200."""

    def __init__(self) -> None:
        super().__init__(max_model_len=512)
        self.compute_device = ComputeDevice(
            "cuda:0", "NVIDIA H200", measure_memory=lambda: DeviceMemory(141 * GIB, 100 * GIB)
        )
        self.model_size = ModelSize(
            layer_parameters=10**9, head_parameters=10**8, attention_width=512, windows=(None,) * 4
        )

    @property
    def model_identity(self) -> ModelIdentity:
        return replace(super().model_identity, dtype="bfloat16")


async def test_node_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "build_engine", lambda *_: FakeGpuEngine())
    stop = asyncio.Event()
    async with running_coordinator(mode="colocated", engine="paced", heartbeat=0.1) as bench:
        config = Config(
            coordinator=bench.cluster_port_address,
            engine="paced",
            name="decode-0",
            kv_memory="2MiB",
            segment_dir=str(tmp_path),
        )
        node = asyncio.create_task(assemble.run_node(config, Role.DECODE, stop))
        try:
            await bench.wait_until(lambda: bench.operations.get_status().nodes[:] != [])
            await bench.generate((5, 6, 7, 8), 8)
            await wait_for_utilization(bench)
            device = bench.operations.get_status().nodes[0].stats.device
            metrics = generate_latest(bench.metrics.registry).decode()
        finally:
            stop.set()
            await node
    assert (device.device, device.name, device.threads) == ("cuda:0", "NVIDIA H200", 0)
    assert (device.memory_used_bytes, device.memory_total_bytes) == (100 * GIB, 141 * GIB)
    assert device.mfu > 0
    assert device.mbu > 0
    assert 'baton_mfu{node="decode-0"}' in metrics
    assert 'baton_mbu{node="decode-0"}' in metrics


async def wait_for_utilization(bench: CoordinatorHarness) -> None:
    """Until a heartbeat has brought it."""
    member = bench.dispatcher.brain.node_registry.by_name(NodeName("decode-0"))
    assert member is not None

    def is_reported() -> bool:
        device = member.stats.device if member.stats else None
        return device is not None and device.mbu is not None

    await bench.wait_until(is_reported)
