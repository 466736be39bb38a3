"""`make demo`: run a small cluster, stream one answer, and show its timeline.

The processes listen on free ports, and nothing is left behind.
"""

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import grpc
from rich.console import Console

from baton.cli.common.default_model import find_default_model
from baton.cli.common.errors import innermost_error
from baton.cli.supervisor.child_output import LogFiles
from baton.cli.supervisor.child_specs import complete_config
from baton.cli.supervisor.ports import reserve_ports
from baton.cli.supervisor.run_cluster import ready_announcement
from baton.cli.supervisor.supervisor import Supervisor, running_cluster
from baton.cli.views.timeline import render_timeline
from baton.config.settings import Config
from baton.errors import BatonError
from baton.pb import common_pb2, generation_pb2, generation_pb2_grpc
from baton.shared_memory import segment
from kv_kernels.native.native_library import load_library
from tools.footprint import disk_bytes, list_segment_files, measure_cluster_memory

# The bundled model continues this to a whole function and ends by itself.
PROMPT = 'def read_lines(path):\n    """Read'
MAX_TOKENS = 120
START_TIMEOUT = 120.0  # seconds


async def run_demo(console: Console, model: Path, folder: Path, began: float) -> None:
    config, sockets = reserve_ports(complete_config(demo_config(model, folder))[0])
    logs = LogFiles(folder / "logs")
    segments = Path(config.segment_dir)
    foreign_segments = list_segment_files(segments, segment.SEGMENT_PREFIX)
    try:
        async with running_cluster(config, logs, console.print) as cluster:
            with console.status("starting coordinator, prefill node and decode node"):
                async with asyncio.timeout(START_TIMEOUT):
                    await cluster.wait_until_ready()
            console.print(
                ready_announcement(config, cluster.endpoints),
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
            console.print(
                "processes: "
                + ", ".join(f"{name} {pid}" for name, pid in cluster.get_pids().items())
            )
            ready = time.monotonic()
            first, timeline = await stream_answer(console, cluster)
            console.print(render_timeline(timeline))
            console.print(f"CPU kernels: {load_library().describe()}", highlight=False)
            console.print(
                f"ready after {ready - began:.1f} s, "
                f"first token {first - began:.1f} s after the start",
                highlight=False,
            )
            pids = list(cluster.get_pids().values())
            own_segments = list_segment_files(segments, segment.SEGMENT_PREFIX) - foreign_segments
            console.print(
                await asyncio.to_thread(describe_footprint, pids, own_segments), highlight=False
            )
    finally:
        logs.close()
        for reserved in sockets:
            reserved.close()


def demo_config(model: Path, folder: Path) -> Config:
    return Config(
        model=str(model),
        state_dir=str(folder),
        port=0,
        grpc_port=0,
        admin_port=0,
        kv_memory="128MiB",
        pool_memory="128MiB",
        drain_timeout=5.0,
    )


def describe_footprint(pids: list[int], segments: Iterable[Path]) -> str:
    """Return the memory of the running cluster and the disk space of the installation."""
    try:
        memory = measure_cluster_memory(pids, segments)
    except OSError as error:
        text = f"memory: not readable ({error.strerror})"
    else:
        text = (
            f"memory: {memory.private_bytes / 1e9:.2f} GB in {len(pids)} processes, "
            f"{memory.segment_bytes / 1e9:.2f} GB of shared memory for the caches"
        )
    if sys.prefix != sys.base_prefix:
        text += f"\ndisk: {disk_bytes(Path(sys.prefix)) / 1e9:.2f} GB in {Path(sys.prefix).name}"
    return text


async def stream_answer(console: Console, cluster: Supervisor) -> tuple[float, common_pb2.Timeline]:
    """Stream one answer to the terminal. Returns the time of its first token, and its timeline."""
    request = generation_pb2.GenerateRequest(text=PROMPT, max_tokens=MAX_TOKENS, temperature=0.0)
    console.rule("a prompt, and the answer token by token")
    console.print(PROMPT, style="bold", end="", highlight=False, markup=False, soft_wrap=True)
    first = 0.0
    async with grpc.aio.insecure_channel(cluster.endpoints.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        async for message in stub.Generate(request, timeout=60.0):
            first = first or time.monotonic()
            sys.stdout.write(message.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    console.rule("where its time went")
    return first, message.timeline


def main() -> int:
    began = time.monotonic()
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="baton-demo-"))
    try:
        model = find_default_model()
        asyncio.run(run_demo(console, model, folder, began))
    except Exception as group:
        error = innermost_error(group)
        if not isinstance(error, BatonError | TimeoutError | grpc.RpcError):
            raise
        reason = str(error) or "the cluster did not start in time"
        console.print(f"error: {reason}; its logs are in {folder / 'logs'}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
