"""Real processes whose log lines nobody takes: a full disk, a pipe that nobody reads. Everything
else goes on."""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from baton.cluster_link.dialer import PROOF_METADATA_KEY, CoordinatorDialer, derive_link_proof
from baton.cluster_link.stream import open_link_stream
from baton.process.log_rate_limit import DEFAULT_BURST
from tests.cluster import SUPERVISOR, Cluster
from tests.processes import find_pids

ROOT = Path(__file__).resolve().parents[3]
PROMPT = list(range(1, 40))
_ONE_PAGE = 4096  # bytes: the smallest pipe
_TIMEOUT_SECONDS = 60.0  # seconds, on any machine


async def check_answers(cluster: Cluster, requests: int = 10) -> None:
    answers = await asyncio.gather(
        *(cluster.generate(PROMPT, max_tokens=4, temperature=0.0) for _ in range(requests)),
    )
    assert [len(answer.tokens) for answer in answers] == [4] * requests


def full_pipe() -> tuple[int, int]:
    """A pipe whose writer blocks at once, as a pager's that shows its first page."""
    reader, sender = os.pipe()
    fcntl.fcntl(sender, fcntl.F_SETPIPE_SZ, _ONE_PAGE)
    os.set_blocking(sender, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(sender, b"\n" * _ONE_PAGE)
    os.set_blocking(sender, True)
    return reader, sender


async def test_unread_stdout_and_stderr_block_nothing(tmp_path: Path) -> None:
    """From the start on: the cluster becomes ready, serves, restarts a node, and ends."""
    cluster = Cluster(tmp_path, supervised=True, engine="paced", model="")
    reader, sender = full_pipe()
    cluster.logs.redirect_output(SUPERVISOR, sender)
    async with cluster:
        await check_answers(cluster)
        gone = cluster.get_pids()["decode-0"]
        cluster.kill("decode-0")
        await cluster.wait_status(
            lambda status: status.ready and gone not in {node.pid for node in status.nodes}
        )
        await check_answers(cluster)
        events = await asyncio.to_thread(
            read_until, reader, "decode-0 was ended by SIGKILL: starting it again in 0.1 s"
        )
        # what was logged in the meantime arrives as soon as it is read
        assert "warm-up request succeeded" in events
        await check_answers(cluster)
    os.close(reader)
    cluster.assert_clean()


def read_until(reader: int, event: str) -> list[str]:
    """The events of the lines up to this one. Lines on standard error are JSON; the announcement is
    on the other."""
    events = []
    with os.fdopen(os.dup(reader), "rb") as pipe:
        for line in pipe:
            with contextlib.suppress(ValueError):
                events.append(json.loads(line)["event"])
            if event in events:
                break
    return events


async def test_full_log_disk_costs_no_request_and_no_node(tmp_path: Path) -> None:
    """Without a supervisor between: each process writes to the full disk itself."""
    cluster = Cluster(tmp_path, engine="paced", model="")
    for name in ("coordinator", "prefill-0", "decode-0"):
        cluster.logs.redirect_output(name, os.open("/dev/full", os.O_WRONLY))
    async with cluster:
        before = {node.name: node.incarnation for node in (await cluster.get_status()).nodes}
        await check_answers(cluster)
        assert {
            node.name: node.incarnation for node in (await cluster.get_status()).nodes
        } == before
        async with httpx2.AsyncClient() as client:
            metrics = (await client.get(f"{cluster.admin_url}/metrics")).text
        assert (
            float(re.findall(r"^baton_log_lines_dropped_total (\S+)", metrics, re.MULTILINE)[0]) > 0
        )
        assert 'baton_node_log_lines_dropped_total{node="decode-0"}' in metrics
    cluster.assert_clean()


@pytest.fixture
def detached(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Starts `baton up --detach` with some variables; what it announces, and the pid and logs of
    its supervisor."""
    state = tmp_path / "state"
    environ = {f"BATON_{port}": "0" for port in ("PORT", "GRPC_PORT", "ADMIN_PORT", "POOL_MEMORY")}
    environ |= {
        "BATON_STATE_DIR": str(state),
        "BATON_SEGMENT_DIR": str(tmp_path),
        "BATON_KV_MEMORY": "16MiB",
    }

    def start(**more: str) -> dict[str, Any]:
        command = [
            sys.executable,
            "-m",
            "baton.cli",
            "up",
            "--detach",
            "--engine",
            "paced",
            "--log-format",
            "json",
        ]
        up = subprocess.run(
            command,
            env=os.environ | environ | more,
            cwd=ROOT,
            capture_output=True,
            timeout=90,
            check=True,
        )
        where: dict[str, Any] = json.loads(up.stdout)
        (pid_file,) = state.rglob("up.pid")
        return where | {
            "pid": int(re.findall(r"\d+", pid_file.read_text())[0]),
            "logs": pid_file.parent / "logs",
        }

    yield start
    down = [sys.executable, "-m", "baton.cli", "down"]
    ended = subprocess.run(
        down, env=os.environ | environ, cwd=ROOT, capture_output=True, timeout=90, check=False
    )
    left = find_pids("BATON_STATE_DIR", str(state))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (ended.returncode, left) == (0, [])


def test_log_files_rotate_and_resume_after_a_full_disk(
    detached: Callable[..., dict[str, Any]],
) -> None:
    """The disk is a limit on what files the supervisor may write, which its children do not
    have."""
    up = detached(BATON_LOG_MAX_BYTES="8192", BATON_LOG_BACKUPS="1")
    files = [up["logs"] / name for name in ("coordinator.log", "coordinator.log.1")]
    with httpx2.Client(base_url=up["http"], timeout=_TIMEOUT_SECONDS) as client:

        def ask() -> None:
            answer = client.post(
                "/completions", json={"prompt": PROMPT, "max_tokens": 2, "return_token_ids": True}
            )
            assert answer.status_code == 200

        def told() -> str:
            return "".join(file.read_text() for file in files if file.exists())

        while not files[1].exists():
            ask()
        before = resource.prlimit(up["pid"], resource.RLIMIT_FSIZE)
        resource.prlimit(up["pid"], resource.RLIMIT_FSIZE, (1, before[1]))
        for _ in range(20):
            ask()
        resource.prlimit(up["pid"], resource.RLIMIT_FSIZE, before)
        while "log lines dropped" not in told():
            ask()
    own = [json.loads(line) for line in (up["logs"] / "up.log").read_text().splitlines()]
    assert {line["node"] for line in own} == {"up"}  # no text among the lines
    assert sorted(path.name for path in up["logs"].glob("coordinator*")) == [
        file.name for file in files
    ]
    assert all(
        file.stat().st_size < 3 * 8192 for file in files
    )  # a batch of lines may pass the bound


async def test_refused_joins_are_logged_at_a_bounded_rate(tmp_path: Path) -> None:
    async with Cluster(
        tmp_path, engine="paced", model="", prefill=0, cluster_token="right"
    ) as cluster:
        async with CoordinatorDialer("right").open_channel(cluster.endpoints.cluster) as channel:
            for _ in range(5 * DEFAULT_BURST):
                call = open_link_stream(
                    channel, ((PROOF_METADATA_KEY, derive_link_proof("wrong")),)
                )
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        counters = (await cluster.get_status()).counters
        assert counters['baton_joins_total{outcome="unauthenticated"}'] == 5 * DEFAULT_BURST
    told = (
        cluster.logs.log_path("coordinator").read_text().count("join refused: wrong cluster token")
    )
    assert DEFAULT_BURST <= told < 5 * DEFAULT_BURST
