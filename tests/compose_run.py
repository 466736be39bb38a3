"""The services of a compose file as local processes: the same commands and environments, without
containers.

What a container has of its own is mapped: service names and wildcards to 127.0.0.1, ports to free
ones, volumes and the image's folders to temporary ones. Everything else is as the file says.
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.cli.client import health_watch as health
from baton.cli.supervisor.ports import reserve_port
from tests.child_logs import ChildLogs
from tests.compose_file import ComposeFile, ComposeService
from tests.fork_server import ForkedProcess, start_process
from tests.processes import await_unless_exit

ROOT = Path(__file__).resolve().parent.parent
_WILDCARD = "0.0.0.0"
_ENDPOINT = re.compile(r"([\w.-]+):(\d+)")


@dataclass(slots=True)
class ServiceProcess:
    """One replica of a service."""

    name: str
    service: ComposeService
    environ: dict[str, str] = field(default_factory=dict)
    ports: dict[str, str] = field(default_factory=dict)  # in the container -> here
    held_sockets: list[socket.socket] = field(default_factory=list)
    process: subprocess.Popen[bytes] | ForkedProcess | None = None

    def host_port(self, inside: str) -> str:
        """Held, but not listened on, from its first mention until the process has ended."""
        if inside not in self.ports:
            self.held_sockets.append(reserve_port("127.0.0.1", 0, ""))
            self.ports[inside] = str(self.held_sockets[-1].getsockname()[1])
        return self.ports[inside]


class ComposeRun:
    """`paths` are folders of the containers, beside their volumes, and where each lies here;
    `image` is the image's environment. Volumes lie in `volumes`, one folder each. With `is_forked`
    processes are forked (tests/fork_server.py)."""

    def __init__(
        self,
        compose: ComposeFile,
        *profiles: str,
        folder: Path,
        volumes: Path,
        paths: Mapping[str, Path],
        image: Mapping[str, str],
        is_forked: bool = False,
    ) -> None:
        ours = [
            service
            for service in compose.startup_order(*profiles)
            if service.command[:1] == ("python",)
        ]
        self._startup_groups = [
            [
                ServiceProcess(f"{service.name}-{number + 1}", service)
                for number in range(service.replicas)
            ]
            for service in ours
        ]
        self.cwd = folder / "empty"
        self.cwd.mkdir()
        self._folder, self._volumes, self._paths = folder, volumes, paths
        self._is_forked = is_forked
        self.logs = ChildLogs(folder / "logs")
        for container in self.processes:
            container.environ = self._environ_of(container, image)

    @property
    def processes(self) -> list[ServiceProcess]:
        return [container for wave in self._startup_groups for container in wave]

    def get_process(self, service: str) -> ServiceProcess:
        """The first replica."""
        return next(container for container in self.processes if container.service.name == service)

    # life

    def start(self) -> None:
        for container in self.processes:
            container.process = self._start_process(container)

    def _start_process(self, container: ServiceProcess) -> subprocess.Popen[bytes] | ForkedProcess:
        log = self.logs.open_log(container.name)
        if self._is_forked:
            interpreter, option, module = container.service.command
            assert (interpreter, option) == ("python", "-m")
            return start_process(module, container.environ, log, folder=self.cwd)
        return subprocess.Popen(
            self._argv(container.service.command),
            env=container.environ,
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    async def wait_ready(self, within: float = 90.0) -> None:
        """Wait until the coordinator serves; fail at once when a process ends instead."""
        pids = {c.process.pid: c.name for c in self.processes if c.process is not None}
        async with asyncio.timeout(within):
            port = self.get_process("coordinator").host_port("50051")
            grpc = f"127.0.0.1:{port}"
            ended = await await_unless_exit(health.wait_until_serving(grpc), pids)
        assert ended is None, self.log_tail(pids[ended])

    def run_healthcheck(self, container: ServiceProcess) -> subprocess.CompletedProcess[str]:
        """Run the health check as the engine would: in the container's environment."""
        kind, *command = container.service.healthcheck_command
        assert kind == "CMD"
        limit = float(container.service.raw["healthcheck"]["timeout"].removesuffix("s"))
        return subprocess.run(
            self._argv(tuple(command)),
            env=container.environ,
            cwd=self.cwd,
            capture_output=True,
            text=True,
            timeout=limit * 3,  # the machine of a test is shared
            check=False,
        )

    async def stop(self) -> dict[str, int]:
        """SIGTERM to one service after the other, each when its dependents are gone, as Compose
        does. Returns the exit codes; -SIGKILL for who outlasts the grace."""
        codes = {}
        for wave in reversed(self._startup_groups):
            for container in wave:
                if container.process is not None and container.process.poll() is None:
                    container.process.send_signal(signal.SIGTERM)
            for container in wave:
                if container.process is not None:
                    codes[container.name] = await asyncio.to_thread(
                        _end, container.process, container.service.stop_grace_seconds
                    )
        return codes

    def close(self) -> None:
        for container in self.processes:
            if container.process is not None and container.process.poll() is None:
                container.process.kill()
                container.process.wait()
            for held in container.held_sockets:
                held.close()
        self.logs.close()

    def log_tail(self, name: str) -> str:
        return f"{name}:\n" + "\n".join(self.logs.last_lines(name))

    # mapping

    def _environ_of(self, container: ServiceProcess, image: Mapping[str, str]) -> dict[str, str]:
        environ = {
            name: self._localize(container, name, value)
            for name, value in {**image, **container.service.environ}.items()
            if name != "PATH"
        }
        return environ | {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
        }

    def _localize(self, container: ServiceProcess, name: str, value: str) -> str:
        if name.endswith("_PORT"):
            return container.host_port(value)
        if value == _WILDCARD:
            return "127.0.0.1"
        endpoint = _ENDPOINT.fullmatch(value)
        if endpoint is not None:
            owner = container if endpoint[1] == _WILDCARD else self.get_process(endpoint[1])
            return f"127.0.0.1:{owner.host_port(endpoint[2])}"
        return self._localize_path(container, value)

    def _localize_path(self, container: ServiceProcess, value: str) -> str:
        """A path that begins with a mount of the container, or with a folder of its image."""
        for inside, here in self._mounted_folders(container):
            if value == inside or value.startswith(f"{inside}/"):
                return f"{here}{value.removeprefix(inside)}"
        return value

    def _mounted_folders(self, container: ServiceProcess) -> Iterator[tuple[str, Path]]:
        for mount in container.service.mounts:
            if mount.kind == "bind":
                yield mount.target, (ROOT / mount.source).resolve()
                continue
            private = self._folder / container.name / mount.target.strip("/")
            here = self._volumes / mount.source if mount.kind == "volume" else private
            here.mkdir(parents=True, exist_ok=True)
            yield mount.target, here
        yield from self._paths.items()

    def _argv(self, command: tuple[str, ...]) -> list[str]:
        return [sys.executable if word == "python" else word for word in command]


def _end(process: subprocess.Popen[bytes] | ForkedProcess, grace: float) -> int:
    try:
        return process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
