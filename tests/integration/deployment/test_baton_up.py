"""`baton up` with real processes: what it starts, keeps running, and leaves behind (nothing)."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.pb.cluster_pb2 import StatusResponse
from tests.cluster import SUPERVISOR, Cluster
from tests.models import build_model
from tests.processes import find_pids, read_environ, wait_first_exit

ROOT = Path(__file__).resolve().parents[3]
CHILDREN = {"coordinator": "coordinator", "prefill-0": "prefill_node", "decode-0": "decode_node"}
PROMPT = list(range(1, 40))


def paced_cluster(folder: Path, **settings: Any) -> Cluster:
    """Real processes, and nothing to load: what is tested is the supervisor."""
    return Cluster(folder, supervised=True, engine="paced", model="", **settings)


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]


def parent_pid(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[1])


def ready_without(pid: int, status: StatusResponse) -> bool:
    """Also without a prefill node a cluster is ready: all of them must be there."""
    return (
        status.ready
        and len(status.nodes) == len(CHILDREN) - 1
        and pid not in {node.pid for node in status.nodes}
    )


async def test_children_run_their_modules_without_secrets_on_the_command_line(
    tmp_path: Path,
) -> None:
    async with paced_cluster(tmp_path, api_key="a-secret", admin_token="another") as cluster:
        pids = cluster.get_pids()
        supervisor = pids.pop(SUPERVISOR)
        assert set(pids) == set(CHILDREN)
        for name, pid in pids.items():
            assert parent_pid(pid) == supervisor
            assert command_line(pid) == [sys.executable, "-m", CHILDREN[name]]
        tokens = {read_environ(pid)["BATON_CLUSTER_TOKEN"] for pid in pids.values()}
        assert len(tokens) == 1
        assert len(tokens.pop()) == 64
        answer = await cluster.generate(PROMPT, max_tokens=4, temperature=0.0)
        assert len(answer.tokens) == 4
    cluster.assert_clean()


async def test_killed_process_is_restarted_and_the_cluster_serves(tmp_path: Path) -> None:
    async with paced_cluster(tmp_path) as cluster:
        expected = (await cluster.generate(PROMPT, max_tokens=8, temperature=0.0)).tokens
        for name in CHILDREN:
            gone = cluster.get_pids()[name]
            cluster.kill(name)
            await cluster.wait_status(partial(ready_without, gone))
            answer = await cluster.generate(PROMPT, max_tokens=8, temperature=0.0)
            assert answer.tokens == expected
            assert cluster.get_pids()[name] != gone
        await cluster.wait_idle()
    cluster.assert_clean()


async def test_killed_supervisor_ends_its_children_and_the_next_one_sweeps_segments(
    tmp_path: Path,
) -> None:
    async with paced_cluster(tmp_path / "first") as cluster:
        pids = cluster.get_pids()
        cluster.kill(SUPERVISOR)
        for name in CHILDREN:
            await wait_first_exit([pids[name]])
        orphans = sorted(path.name for path in cluster.segment_dir.glob("baton-*"))
        assert orphans  # kill -9 gave nobody the time to clean up
        async with paced_cluster(tmp_path / "second", segment_dir=str(cluster.segment_dir)):
            left = {path.name for path in cluster.segment_dir.glob("baton-*")}
        assert not left & set(orphans)
    cluster.assert_clean()


def run_baton(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "baton.cli", *arguments],
        env={**os.environ, **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.fixture
def free(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables of a cluster on free ports, in folders of its own; checks that nothing of it is
    left."""
    shared = tmp_path / "segments"
    shared.mkdir()
    state = tmp_path / "state"
    yield {
        "BATON_PORT": "0",
        "BATON_GRPC_PORT": "0",
        "BATON_ADMIN_PORT": "0",
        "BATON_STATE_DIR": str(state),
        "BATON_SEGMENT_DIR": str(shared),
        "BATON_KV_MEMORY": "16MiB",
        "BATON_POOL_MEMORY": "16MiB",
        "BATON_DRAIN_TIMEOUT": "5",
    }
    left = find_pids("BATON_STATE_DIR", str(state))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    assert list(shared.glob("baton-*")) == []


def test_up_detached_then_down(free: dict[str, str], tmp_path: Path) -> None:
    """The whole of the command line against a real model."""
    model = build_model("llama", tmp_path)
    up = run_baton("up", "--detach", "--model", str(model), "--served-model-name", "small", **free)
    assert up.returncode == 0, up.stderr
    assert "small, 1 prefill + 1 decode, disaggregated" in up.stdout
    where = dict(re.findall(r"^  (\w+) +(\S+)$", up.stdout, re.MULTILINE))
    free["BATON_ENDPOINT"] = where["gRPC"]

    answers = [
        run_baton(
            "generate",
            "The quick brown fox",
            "--max-tokens",
            "6",
            "--temperature",
            "0",
            *more,
            **free,
        )
        for more in ((), ("--json",), ("--timeline",))
    ]
    assert [answer.returncode for answer in answers] == [0, 0, 0]
    whole = json.loads(answers[1].stdout)
    assert answers[0].stdout == answers[2].stdout == whole["text"] + "\n"
    assert whole["usage"]["completion_tokens"] == len(whole["token_ids"]) == 6
    assert whole["timeline"]["decode_node"] == "decode-0"
    assert "first token" in answers[2].stderr

    status = run_baton("status", "--json", **free)
    assert status.returncode == 0
    nodes = {node["name"]: node["role"] for node in json.loads(status.stdout)["nodes"]}
    assert nodes.pop("pool-0", "pool") == "pool"  # nobody waits for it to join
    assert nodes == {"prefill-0": "prefill", "decode-0": "decode"}
    audit = run_baton("audit", "--json", **free)
    assert (audit.returncode, json.loads(audit.stdout)["faults"]) == (0, [])

    refused = run_baton("generate", "x", "--temperature", "9", **free)
    assert refused.returncode == 1
    assert "temperature is 9" in refused.stderr

    again = run_baton("up", "--detach", "--model", str(model), **free)
    assert again.returncode == 2
    assert "runs from" in again.stderr

    down = run_baton("down", **free)
    assert (down.returncode, down.stdout) == (0, "stopped\n")
    assert run_baton("down", **free).returncode == 1
    assert run_baton("status", **free).returncode == 3


def test_interrupted_up_leaves_nothing_in_the_background(free: dict[str, str]) -> None:
    command = [sys.executable, "-m", "baton.cli", "up", "--detach", "--engine", "paced"]
    log = Path(free["BATON_STATE_DIR"], "logs", "up.log")  # of the process in the background
    give_up_at = time.monotonic() + 60

    def heed_interrupts() -> None:  # a shell starts background processes with SIGINT ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    environ = {**os.environ, **free}
    with subprocess.Popen(command, env=environ, cwd=ROOT, preexec_fn=heed_interrupts) as up:
        while not log.exists() and time.monotonic() < give_up_at:
            time.sleep(0.01)
        up.send_signal(signal.SIGINT)
        assert up.wait(timeout=60) == 130
    assert find_pids("BATON_STATE_DIR", free["BATON_STATE_DIR"]) == []


def test_up_reports_a_missing_model_in_one_line(free: dict[str, str], tmp_path: Path) -> None:
    up = run_baton("up", "--detach", "--model", str(tmp_path / "no-such-model"), **free)
    assert up.returncode == 2
    assert up.stdout == ""
    lines = [line for line in up.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "no-such-model" in lines[0]


def test_up_reports_a_port_in_use_before_it_starts_anything(free: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        up = run_baton("up", "--engine", "paced", "--grpc-port", port, **free)
    assert up.returncode == 2
    assert f"127.0.0.1:{port} (it is in use): choose another --grpc-port" in up.stderr


@pytest.mark.parametrize(
    ("flags", "variables", "said"),
    [
        (
            ("--log-format", "json", "--max-queue", "0"),
            {"BATON_LOG_FORMAT": "json"},
            "max_queue",
        ),  # unresolved
        (("--log-format", "json", "--host", "0.0.0.0"), {}, "--api-key"),
        (
            ("--log-format", "json", "--set", "max_num_seqs=1"),
            {"BATON_FAILPOINTS": "no.such=drop"},
            "no.such",
        ),
    ],
)
def test_up_failure_is_json_with_json_logs(
    free: dict[str, str], flags: tuple[str, ...], variables: dict[str, str], said: str
) -> None:
    """Before the settings are resolved, before anything starts, and by a child that cannot
    start."""
    up = run_baton("up", "--engine", "paced", *flags, **free, **variables)
    assert up.returncode == 2
    lines = [json.loads(line) for line in up.stderr.splitlines()]
    assert (lines[-1]["event"], lines[-1]["level"]) == ("process failed", "error")
    assert said in lines[-1]["reason"]


def test_up_refuses_a_public_bind_without_an_api_key(free: dict[str, str]) -> None:
    up = run_baton("up", "--engine", "paced", "--host", "0.0.0.0", **free)
    assert up.returncode == 2
    assert "--api-key" in up.stderr
