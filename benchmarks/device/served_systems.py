"""The servers of the served figures: clusters of Baton, and vLLM where it is installed."""

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from baton.config.pool_config import NO_POOL
from benchmarks.clusters.local_cluster import serve_model_folder
from benchmarks.device.section_run import MeasuredModel
from benchmarks.load import http_stream
from benchmarks.load.http_stream import HttpError, parse_url

MODEL_NAME = "benchmark-model"
COLOCATED, ONE_PREFILL_ONE_DECODE, VLLM = "colocated", "1p1d", "vllm"
_STOP_SECONDS = 15.0
_PAUSE_SECONDS = 0.5  # between two questions whether a server is ready
_SHOWN_LOG_BYTES = 3000
_OTHER_DEVICE_BYTES = 10 << 30  # activations, graphs and contexts of one server


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What all servers of a run have in common."""

    model: MeasuredModel
    device: str
    cache_bytes: int  # of KV for each node
    max_model_len: int
    max_num_seqs: int
    overrides: Mapping[str, Any]  # further settings of Baton

    def device_bytes(self, system: str) -> int:
        """Memory of the device that a server takes, about."""
        nodes = 2 if system == ONE_PREFILL_ONE_DECODE else 1
        return nodes * (self.model.bounds.resident_bytes + self.cache_bytes + _OTHER_DEVICE_BYTES)


def find_vllm(python: str) -> str:
    """The interpreter to run vLLM with: the given one, or this one if it has vLLM; else empty."""
    if python:
        return python
    return sys.executable if importlib.util.find_spec("vllm") is not None else ""


def start_baton(
    console: Console,
    settings: ServerSettings,
    *,
    prefill_nodes: int,
    decode_nodes: int = 1,
    start_timeout: float,
) -> AbstractAsyncContextManager[str]:
    """Run a cluster, colocated if it has no prefill node; the value is its URL."""

    @asynccontextmanager
    async def run_cluster() -> AsyncIterator[str]:
        own: dict[str, Any] = {
            "mode": "disaggregated" if prefill_nodes else "colocated",
            "prefill": prefill_nodes,
            "decode": decode_nodes,
            "device": settings.device,
            "load_format": settings.model.load_format,
            "served_model_name": MODEL_NAME,
            "kv_memory": str(settings.cache_bytes),
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "pool_memory": NO_POOL,
        }
        options = own | dict(settings.overrides)
        async with serve_model_folder(
            console, settings.model.folder, start_timeout=start_timeout, **options
        ) as cluster:
            yield f"http://{cluster.endpoints.http}"

    return run_cluster()


@asynccontextmanager
async def start_vllm(
    python: str,
    settings: ServerSettings,
    device_memory: int,
    start_timeout: float,
    *,
    gpu: int | None = None,
    chunk_tokens: int | None = None,
) -> AsyncIterator[str]:
    """Run vLLM as a process group of its own; the value is its URL.

    It computes on the given GPU, else on the first, and in steps of at most `chunk_tokens`, else of
    as many as it has by default. Raises ValueError with the end of its log if it does not become
    ready.
    """
    port = _find_free_port()
    with TemporaryDirectory(prefix="baton-bench-vllm-") as folder:
        log = Path(folder, "log")
        arguments = list_vllm_arguments(settings, port, device_memory)
        if chunk_tokens is not None:
            arguments += ("--max-num-batched-tokens", str(chunk_tokens))
        environ = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        process = await _start_group([python, *arguments], log, environ)
        try:
            url = f"http://127.0.0.1:{port}"
            if not await _wait_until_ready(url, process, start_timeout):
                end = await asyncio.to_thread(_read_end, log)
                raise ValueError(f"vLLM does not answer within {start_timeout:.0f} s:\n{end}")
            yield url
        finally:
            await _end_group(process)


def list_vllm_arguments(settings: ServerSettings, port: int, device_memory: int) -> tuple[str, ...]:
    """The command line of vLLM, after the interpreter. Its caches of prefixes are off."""
    share = settings.device_bytes(VLLM) / device_memory
    return (
        *("-m", "vllm.entrypoints.cli.main", "serve", str(settings.model.folder)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", MODEL_NAME),
        *("--load-format", settings.model.load_format),
        *("--max-model-len", str(settings.max_model_len)),
        *("--max-num-seqs", str(settings.max_num_seqs)),
        *("--gpu-memory-utilization", f"{min(0.9, share):.3f}"),
        "--no-enable-prefix-caching",
        "--no-enable-log-requests",
    )


def _vllm_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """No downloads, no reports of use, and collective libraries on loopback.

    What `environ` has takes precedence.
    """
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled at start, by a compiler for CUDA
        **environ,
    }


async def _start_group(
    command: Sequence[str], log: Path, environ: Mapping[str, str]
) -> asyncio.subprocess.Process:
    """Start a process as the leader of a group; it works in the folder of its log."""
    output = await asyncio.to_thread(log.open, "wb")
    with output:
        return await asyncio.create_subprocess_exec(
            *command,
            cwd=log.parent,
            env=_vllm_environment({**os.environ, **environ}),
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )


def _read_end(log: Path) -> str:
    return log.read_bytes()[-_SHOWN_LOG_BYTES:].decode(errors="replace")


async def _wait_until_ready(
    url: str, process: asyncio.subprocess.Process, start_timeout: float
) -> bool:
    """Ask for the models until there is an answer; False if the process ends or time is up."""
    target = parse_url(url)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(start_timeout):
            while process.returncode is None:
                with contextlib.suppress(OSError, HttpError):
                    async with http_stream.open_request(target, "GET", "/v1/models", {}) as answer:
                        if answer.status == 200:
                            return True
                await asyncio.sleep(_PAUSE_SECONDS)
    return False


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End a process and its children."""
    for sent, seconds in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.wait()


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
