"""`python -m tools.request_trace`: the files of ours that one disaggregated request runs through.

It counts from the moment at which the client sends its bytes to the call of the model's `forward`
on the prefill node, in all processes. Each process gets a profile function that notes when one of
our functions is called. A file is on the path if it ran for every one of many requests. What runs
only now and then, such as heartbeats, is not, and neither is what runs at the same time and only
sometimes ends before `forward`, such as the decode node's reservation of blocks.

The cluster has no shared pool unless `--pool` is given. `--functions` lists functions instead of
files.
"""

import argparse
import asyncio
import atexit
import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx2
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
FOLDER_VARIABLE = "REQUEST_TRACE_FOLDER"
FORWARD = "Transformer.forward"
_NATIVE_FORWARD = "NativeModel.start_step"  # where that of the native kernels begins
RESOLUTION = 0.0005  # seconds between two notes of one function
REQUESTS = 50
PAUSE = 0.05  # seconds between two requests

Times = dict[str, list[float]]  # by function, as FILE::NAME, or FORWARD


def install_profiler() -> None:
    """In this process and in all threads that it starts; the times are written when it ends."""
    times: Times = defaultdict(list)
    names: dict[CodeType, str] = {}

    def on_event(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        name = names.get(code)
        if name is None:
            name = names[code] = _function_name(code)
        if not name:
            return
        now, noted = time.monotonic(), times[name]
        if not noted or now - noted[-1] > RESOLUTION:
            noted.append(now)

    def write() -> None:
        sys.setprofile(None)
        folder = Path(os.environ[FOLDER_VARIABLE])
        content = {"module": _module_name(), "times": times}
        (folder / f"{os.getpid()}.json").write_text(json.dumps(content))

    atexit.register(write)
    threading.setprofile(on_event)
    sys.setprofile(on_event)


def _function_name(code: CodeType) -> str:
    """FILE::NAME, relative to the repository; FORWARD; or "" for a function that is not ours."""
    path = Path(code.co_filename)
    if code.co_qualname in (FORWARD, _NATIVE_FORWARD):
        return FORWARD
    if not path.is_relative_to(ROOT) or ".venv" in path.parts or "tools" in path.parts:
        return ""
    return "" if "pb" in path.parts else f"{path.relative_to(ROOT)}::{code.co_qualname}"


def _module_name() -> str:
    words = Path("/proc/self/cmdline").read_text().split("\0")
    return words[words.index("-m") + 1] if "-m" in words else ""


def find_on_path(
    sent: list[float], processes: list[dict[str, Any]], *, functions: bool = False
) -> dict[str, set[str]]:
    """By module of the process: the files, or the functions, that ran for every request between its
    sending, in seconds on the monotonic clock, and the next call of `forward`."""
    forwards = sorted(
        moment for process in processes for moment in process["times"].get(FORWARD, [])
    )
    windows = [(began, next(moment for moment in forwards if moment > began)) for began in sent]
    found: dict[str, set[str]] = {}
    for process in processes:
        times_by_name: Times = defaultdict(list)
        for name, times in process["times"].items():
            if name != FORWARD:
                times_by_name[name if functions else name.partition("::")[0]] += times
        on_path = {
            name
            for name, times in times_by_name.items()
            if all(any(began <= time <= end for time in times) for began, end in windows)
        }
        if on_path:
            found[process["module"]] = on_path
    return found


async def send_requests(console: Console, *, has_pool: bool) -> list[float]:
    """Serve a random model with one prefill and one decode node, and send it requests one after
    another. When each was sent, in seconds on the monotonic clock."""
    from baton.config.pool_config import NO_POOL
    from benchmarks.clusters.local_cluster import start_local_cluster
    from benchmarks.clusters.random_models import DEMO_SHAPE

    settings: dict[str, Any] = {} if has_pool else {"pool_memory": NO_POOL}
    sent = []
    async with (
        start_local_cluster(
            console, DEMO_SHAPE, "traced", mode="disaggregated", prefill=1, decode=1, **settings
        ) as cluster,
        httpx2.AsyncClient(timeout=60.0) as client,
    ):
        for number in range(REQUESTS + 1):
            sent.append(time.monotonic())
            await _complete(client, cluster.endpoints.http, number)
            await asyncio.sleep(PAUSE)
    return sent[1:]  # the first one also loads what is loaded late


async def _complete(client: httpx2.AsyncClient, address: str, number: int) -> None:
    body = {"prompt": f"# {number}: a function\ndef f{number}(x):", "max_tokens": 2}
    headers = {"connection": "close"}  # so that accepting one is on the path of each request
    answer = await client.post(f"http://{address}/v1/completions", json=body, headers=headers)
    answer.raise_for_status()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.request_trace", description=__doc__)
    parser.add_argument(
        "--pool",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="run the cluster with a shared pool",
    )
    parser.add_argument(
        "--functions", action="store_true", help="list functions instead of files, as FILE::NAME"
    )
    return parser


def main() -> None:
    options = make_parser().parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(
            "from tools.request_trace import install_profiler\ninstall_profiler()\n"
        )
        os.environ[FOLDER_VARIABLE] = folder
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, str(ROOT), str(ROOT / "kernels")])
        sent = asyncio.run(send_requests(console, has_pool=options.pool))
        dumps = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    found = find_on_path(sent, dumps, functions=options.functions)
    everywhere = set().union(*found.values())
    kind = "functions" if options.functions else "files"
    for module, names in sorted(found.items()):
        sys.stdout.write(f"{module}: {len(names)} {kind}\n")
        sys.stdout.writelines(f"  {name}\n" for name in sorted(names))
    condition = "with" if options.pool else "without"
    sys.stdout.write(
        f"from the request's bytes to forward, {condition} a shared pool: "
        f"{len(everywhere)} {kind}\n"
    )


if __name__ == "__main__":
    main()
