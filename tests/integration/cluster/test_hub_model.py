"""A model named by its hub id: found in the cache, served under its own name, resolved once."""

import shutil
from pathlib import Path

import httpx2
import pytest

from tests.cluster import SUPERVISOR, Cluster
from tests.models import build_model
from tests.processes import read_environ

NAME = "a-team/tiny-qwen3"
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """HF_HOME with the model in its cache."""
    repository = tmp_path / "hf" / "hub" / f"models--{NAME.replace('/', '--')}"
    shutil.copytree(build_model("qwen3", tmp_path), repository / "snapshots" / REVISION)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    return tmp_path / "hf"


async def test_a_cached_hub_model_is_served_offline_and_resolved_once(
    home: Path, tmp_path: Path
) -> None:
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    async with Cluster(
        tmp_path / "cluster",
        supervised=True,
        model=NAME,
        prefill=0,
        mode="colocated",
        environ=offline,
    ) as cluster:
        folders = {
            read_environ(pid)["BATON_MODEL"]
            for name, pid in cluster.get_pids().items()
            if name != SUPERVISOR
        }
        assert folders == {
            str(home / "hub" / "models--a-team--tiny-qwen3" / "snapshots" / REVISION)
        }
        async with httpx2.AsyncClient(base_url=cluster.http_url, timeout=60) as client:
            body = {"model": "tiny-qwen3", "prompt": "The quick brown fox", "max_tokens": 8}
            answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["model"] == "tiny-qwen3"
        assert answer["usage"]["completion_tokens"] == 8
        await cluster.wait_idle()
    cluster.assert_clean()
