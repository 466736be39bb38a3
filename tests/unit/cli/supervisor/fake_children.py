"""Fake child processes of a supervisor, and what a test waits for."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from baton.cli.common.errors import innermost_error
from baton.cli.supervisor.child_output import ChildOutput, LineRelay
from baton.cli.supervisor.supervisor import Supervisor, running_cluster
from baton.config.settings import Config
from baton.errors import ConfigError, NodeFailed

NODE = """
import os, signal, sys
def note(what):
    with open("events", "a") as file:
        file.write(f"{what} {os.environ.get('BATON_NAME') or 'coordinator'}\\n")
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
note("started")
print("hello from", os.environ.get("BATON_NAME"), flush=True)
"""


WAIT = "signal.sigwait({signal.SIGTERM})\nnote('ended')\nos._exit(0)\n"


COORDINATOR = """
import grpc
from concurrent.futures import ThreadPoolExecutor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
servicer = health.HealthServicer()
servicer.set("baton.v1.Generation", health_pb2.HealthCheckResponse.SERVING)
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
assert server.add_insecure_port("127.0.0.1:" + os.environ["BATON_GRPC_PORT"])
server.start()
"""


WriteChildPrograms = Callable[..., None]


@asynccontextmanager
async def cluster(
    config: Config, output: ChildOutput | None = None
) -> AsyncIterator[tuple[Supervisor, list[str]]]:
    notices: list[str] = []
    try:
        async with (
            asyncio.timeout(60),
            running_cluster(
                config, output or LineRelay(lambda *_: None), notices.append
            ) as started,
        ):
            yield started, notices
    except* ConfigError as group:
        raise innermost_error(group) from None
    except* NodeFailed as group:
        raise innermost_error(group) from None


def read_events() -> list[str]:
    return Path("events").read_text().splitlines() if Path("events").exists() else []


def any_alive(pids: Iterable[int]) -> bool:
    return any(Path(f"/proc/{pid}").exists() for pid in pids)


def parent_pid(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[1])


async def wait_until(holds: Callable[[], object]) -> None:
    while True:
        if holds():
            return
        await asyncio.sleep(0.02)


async def wait_for_restart(started: Supervisor, name: str, old: int) -> None:
    await wait_until(lambda: started.get_pids().get(name, old) != old)
