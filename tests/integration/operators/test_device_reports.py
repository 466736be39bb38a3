"""Nodes report the device that they compute on: status, metrics and `baton status` have it."""

from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.cluster import Cluster
from tests.models import build_model


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
