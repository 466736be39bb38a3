"""What README.md and the pages for clients and operators show, done on a real cluster of the
bundled model: commands work, programs print what the pages say, and sample output is current."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from baton.shared_memory import segment
from tests.cluster import Cluster
from tools.demo import describe_footprint
from tools.footprint import list_segment_files

ROOT = Path(__file__).resolve().parents[3]
PAGES = "\n".join(
    (ROOT / name).read_text()
    for name in ("README.md", "docs/clients.md", "docs/operating.md", "docs/benchmarks.md")
)
MODEL = ROOT / "models" / "demo"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGES, re.MULTILINE | re.DOTALL)
SHELL = [text.replace("\\\n", " ") for kind, text in BLOCKS if not kind]
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]
REQUEST = "7bcaa8b3704ed05522887213e38b4f47"  # the one that operating.md explains

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here"),
    pytest.mark.skipif(
        not (MODEL / "config.json").exists(), reason="the bundled model is not here"
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with Cluster(
        tmp_path_factory.mktemp("readme"), model=str(MODEL), pool_memory="16MiB"
    ) as running:
        yield running


def use_cluster_ports(text: str, cluster: Cluster) -> str:
    """Its ports in place of the default ones."""
    for port, address in (
        (8000, cluster.http_url),
        (50051, cluster.grpc_address),
        (9000, cluster.admin_url),
    ):
        text = text.replace(f"127.0.0.1:{port}", address.removeprefix("http://"))
    return text


def run_command(arguments: list[str], cluster: Cluster, *, code: int = 0) -> str:
    environ = os.environ | {
        "BATON_ENDPOINT": cluster.grpc_address,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "COLUMNS": "120",
    }
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=100, env=environ, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def run_baton_line(line: str, cluster: Cluster) -> str:
    return run_command([sys.executable, "-m", "baton.cli", *shlex.split(line)], cluster)


def shell_lines(beginning: str) -> list[str]:
    """Of all shell blocks, without comments."""
    found = [line.partition("  #")[0].strip() for text in SHELL for line in text.splitlines()]
    return [line for line in found if line.startswith(beginning)]


def output_words(text: str) -> set[str]:
    """What a sample of output is made of, without its figures and names."""
    return set(re.findall(r"[a-z][a-z-]{2,}", text.lower().split("\n", 1)[1]))


def shown_output(command: str) -> str:
    """The output that a page shows below `$ command`."""
    match = re.search(
        rf"^\$ {re.escape(command)}\n(.*?)(?=^\$|^```)", PAGES, re.MULTILINE | re.DOTALL
    )
    assert match, command
    return match[1]


async def test_curl_examples_work(cluster: Cluster) -> None:
    calls = [line for line in shell_lines("curl ") if "BATON_API_KEY" not in line]
    assert len(calls) == 4
    for line in calls:
        told = run_command(
            [*shlex.split(use_cluster_ports(line, cluster)), "--fail-with-body", "-s"], cluster
        )
        assert told.endswith("data: [DONE]\n\n") if "stream" in line else json.loads(told)


async def test_example_answer_is_current(cluster: Cluster) -> None:
    (shown,) = (json.loads(text) for kind, text in BLOCKS if kind == "json")
    (command,) = (line for line in shell_lines("curl ") if "def read_lines" in line)
    told = json.loads(
        run_command([*shlex.split(use_cluster_ports(command, cluster)), "-s"], cluster)
    )

    def shape(value: Any) -> Any:
        return (
            {key: shape(item) for key, item in value.items()} if isinstance(value, dict) else None
        )

    assert shape(told) == shape(shown)
    assert shape(told["choices"][0]) == shape(shown["choices"][0])
    assert told["choices"][0]["text"] == shown["choices"][0]["text"]
    assert told["usage"]["completion_tokens"] == shown["usage"]["completion_tokens"]


async def test_python_examples_run(cluster: Cluster) -> None:
    by_openai, by_grpc = (
        run_command([sys.executable, "-c", use_cluster_ports(text, cluster)], cluster)
        for text in PROGRAMS
    )
    assert by_openai.splitlines()[:2] == [
        "I am a very small language model. "
        "I have read the Python standard library and nothing else.",
        "Test whether a path is a directory.",
    ]
    assert (
        by_openai in PAGES or len(by_openai.splitlines()) == 5
    )  # the draws of another machine's bfloat16 may differ
    assert re.search(r"^[0-9a-f]{32}: first token after [0-9.]+ ms$", by_grpc, re.MULTILINE)


async def test_operator_commands_work(cluster: Cluster) -> None:
    name = next(name for name in cluster.get_pids() if name.startswith("prefill"))
    await cluster.wait_status(lambda status: any(node.role == "pool" for node in status.nodes))
    for command in ("status", "audit", "top --once"):
        await cluster.generate("def f(x):", max_tokens=4)  # top tells of the last minute
        told = run_baton_line(command, cluster)
        assert output_words(shown_output(f"baton {command}")) - {
            "prefill",
            "decode",
            *("amd", "epyc"),  # the processor of the page's machine
        } <= output_words(told) | {"service"}, command
    assert f"{name} is drained: nothing is left there" in run_baton_line(f"drain {name}", cluster)
    assert run_baton_line(f"undrain {name}", cluster) == f"{name} is in service\n"
    assert {f"baton {command}" for command in ("drain prefill-0", "undrain prefill-0")} <= {
        line.removeprefix("$ ") for line in shell_lines("$ baton ")
    }


async def test_demo_resource_figures_are_current(cluster: Cluster) -> None:
    """README shows the memory of processes and caches, and the disk space of the installation."""
    told = describe_footprint(
        list(cluster.get_pids().values()),
        list_segment_files(cluster.segment_dir, segment.SEGMENT_PREFIX),
    )
    shown = re.search(r"^memory: .*\ndisk: .*$", PAGES, re.MULTILINE)
    assert shown
    expected = shown[0] if sys.prefix != sys.base_prefix else shown[0].splitlines()[0]

    def without_figures(text: str) -> str:
        return re.sub(r"\d+\.\d+|in \.?\w+$", "", text)

    assert without_figures(told) == without_figures(expected)
    private, caches = (float(figure) for figure in re.findall(r"(\d+\.\d+) GB", told)[:2])
    assert private > 0.1
    assert caches >= 2 * 32 * 2**20 / 1e9, "two nodes and a pool have theirs"


async def test_explain_example_is_current(cluster: Cluster) -> None:
    answer = await cluster.generate(list(range(5, 600)), max_tokens=8, temperature=0.0)
    told = run_baton_line(f"explain {answer.request_id}", cluster)
    shown = shown_output(f"baton explain {REQUEST}")
    assert [line[:18].strip() for line in shown.splitlines()[1:9]] == [
        line[:18].strip() for line in told.splitlines()[1:9]
    ]
    assert output_words(shown) <= output_words(told) | {"cache", "node's", "from", "node"}


async def test_endpoint_benchmark_commands_work(cluster: Cluster, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 40, "hash_ids": [1, 2]}\n' * 3
    )
    commands = shell_lines("baton bench serve --url")
    assert len(commands) == 3
    for line in commands[1:]:
        small = (
            use_cluster_ports(line, cluster)
            .replace("trace.jsonl", str(trace))
            .replace("1,2,4", "1")
            .replace("--requests 8", "--requests 2")
            .replace("--ttft-slo 500ms", "--ttft-slo 60s")  # which the busiest machine keeps
        )
        told = run_baton_line(
            small.removeprefix("baton ") + f" --plot {tmp_path / 'sweep.svg'}", cluster
        )
        assert "tokens/s" in told
        assert "--sweep" not in line or "ceiling with p90 TTFT within 60000 ms" in told
