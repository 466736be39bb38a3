"""A real cluster for tests: each part is a process, on free ports and in its own folders.

    async with Cluster(tmp_path, model=str(folder), prefill=1, decode=2) as cluster:
        answer = await cluster.generate([1, 2, 3], max_tokens=8)
        cluster.kill("decode-0")
        ...
        await cluster.wait_idle()
    cluster.assert_clean()

Entering waits until a warm-up request has been answered and all nodes have joined. Processes are
forked (tests/fork_server.py) and are not restarted when they end, except by `start(name)`; with
`supervised=True` they run under `baton up`. Nothing here is bound to an event loop, so a cluster
may outlive the loop of one test. When the block ends with an error, the logs' ends are printed.
"""

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Self

from baton.cli.checks.ledger import OWNED_STATES, find_ledger_faults
from baton.cli.client import health_watch as health
from baton.cli.supervisor import child_specs
from baton.cli.supervisor.gpus import choose_gpus
from baton.cli.supervisor.ports import Endpoints, cluster_endpoints, reserve_ports
from baton.cli.supervisor.visible_gpus import count_visible_gpus
from baton.config.settings import Config
from baton.pb import cluster_pb2
from tests.child_logs import ChildLogs
from tests.fork_server import ForkedProcess, start_process
from tests.grpc_calls import (
    GenerateAnswer,
    GenerateCall,
    call_cluster_service,
    collect_answer,
    none_if_unavailable,
    stream_generate,
)
from tests.processes import await_unless_exit, find_pids, read_environ, read_module, wait_for_exit

SUPERVISOR = "up"  # the supervisor's name in pids() and logs
DEFAULT_SETTINGS: dict[str, Any] = {
    "port": 0,
    "grpc_port": 0,
    "admin_port": 0,
    "kv_memory": "32MiB",
    "pool_memory": "0",
    "drain_timeout": 5.0,
    "failpoints_rpc": True,
    # Only root may read the environment of a process that must not leave core dumps.
    "core_dumps": os.getuid() != 0,
}
_SHM = Path("/dev/shm")
_EXIT_TIMEOUT_SECONDS = 30.0  # from SIGTERM to SIGKILL


class Cluster:
    """A cluster of `settings`, which are fields of Config. See the module.

    `per_node` maps a process name to its own settings, by field, or to raw environment variables,
    by upper-case name. Processes in `held_back` are not started on entry. `environ` is added to the
    environment of every process; `open_files` is their descriptor limit. `also` maps names of
    additional processes to the name of the process whose settings they copy.
    """

    def __init__(
        self,
        folder: Path,
        *,
        supervised: bool = False,
        per_node: Mapping[str, Mapping[str, object]] | None = None,
        held_back: Collection[str] = (),
        environ: Mapping[str, str] | None = None,
        also: Mapping[str, str] | None = None,
        wait_ready: bool = True,
        start_timeout: float = 100.0,
        open_files: int = 0,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.segment_dir = Path(
            tempfile.mkdtemp(prefix="baton-test-", dir=_SHM if _SHM.is_dir() else None)
        )
        self.config = _config(settings, folder, self.segment_dir)
        self.logs = ChildLogs(folder / "logs")
        self._held_ports: list[Any] = []
        self._supervised = supervised
        self.per_node = {name: dict(own) for name, own in (per_node or {}).items()}
        self._held_back = held_back
        self._environ = {**os.environ, **(environ or {})}
        self._extra_processes = dict(also or {})
        self._wait_ready = wait_ready
        self._start_timeout = start_timeout
        self._open_files = open_files  # of each process, soft and hard
        self._specs: dict[str, child_specs.ChildSpec] = {}
        self._processes: dict[str, subprocess.Popen[bytes] | ForkedProcess] = {}
        self.endpoints: Endpoints
        self.leaked_processes: dict[int, str] = {}
        self.leaked_segments: list[str] = []
        self.ignored_sigterm: list[str] = []

    # life

    async def __aenter__(self) -> Self:
        config, _ = child_specs.complete_config(self.config)
        config, _ = choose_gpus(config, count_visible_gpus(config))
        self.config, self._held_ports = reserve_ports(config)
        self.endpoints = cluster_endpoints(self.config)
        specs = child_specs.make_child_specs(
            self.config,
            self.endpoints,
            environ=self._environ,
            cores=len(os.sched_getaffinity(0)),
            supervisor=os.getpid(),
        )
        self._specs = {spec.name: spec for spec in specs}
        for name, like in self._extra_processes.items():
            spec = self._specs[like]
            self._specs[name] = dataclasses.replace(
                spec, name=name, environ={**spec.environ, "BATON_NAME": name}
            )
        try:
            started = [name for name in self._specs if name not in self._held_back]
            for name in [SUPERVISOR] if self._supervised else started:
                self.start(name)
            if self._wait_ready:
                await self.wait_ready(self._start_timeout)
                nodes = sum(
                    name != child_specs.COORDINATOR for name in started
                )  # it is ready before the last has joined
                await self.wait_status(
                    lambda status: len(status.nodes) >= nodes, self._start_timeout
                )
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        await asyncio.to_thread(self._stop_all)
        self.logs.close()
        for held in self._held_ports:
            held.close()
        if error is not None:
            self.print_logs()
        self.leaked_processes = {pid: _process_name(pid) for pid in self._all_pids()} | {
            process.pid: name for name, process in self._processes.items() if process.poll() is None
        }
        for pid in self.leaked_processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.leaked_segments = sorted(path.name for path in self.segment_dir.rglob("baton-*"))
        shutil.rmtree(self.segment_dir, ignore_errors=True)

    def assert_clean(self) -> None:
        """After the block: no process or segment is left, and every process ended as it should."""
        assert self.leaked_segments == []
        assert self.leaked_processes == {}
        assert self.ignored_sigterm == []
        codes = {name: process.returncode for name, process in self._processes.items()}
        unclean = {name: code for name, code in codes.items() if code not in (0, -signal.SIGKILL)}
        assert unclean == {}, self.log_tail(next(iter(unclean)))

    # processes

    def start(self, name: str) -> None:
        """Start a process that does not run: again after a kill, or for the first time if it was
        held back."""
        process = self._processes.get(name)
        assert process is None or process.poll() is not None, f"{name} runs already"
        if name != SUPERVISOR:
            module, environ = self._child_command(name)
            self._processes[name] = start_process(
                module, environ, self.logs.open_log(name), open_files=self._open_files
            )
            return
        self._processes[name] = subprocess.Popen(
            [sys.executable, "-m", "baton.cli", "up"],
            env=self._up_environ(),
            stdin=subprocess.DEVNULL,
            stdout=self.logs.open_log(name),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def get_pids(self) -> dict[str, int]:
        """Pid by name of the processes that run at this moment."""
        if self._supervised:
            return {name: pid for pid in self._all_pids() if (name := _process_name(pid))}
        return {
            name: process.pid for name, process in self._processes.items() if process.poll() is None
        }

    def send_signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.get_pids()[name], number)

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone (a supervised one may then be started again)."""
        pid = self.get_pids()[name]
        handle = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert wait_for_exit(handle, _EXIT_TIMEOUT_SECONDS), f"{name} outlived SIGKILL"
        if name in self._processes:
            self._processes[name].wait()

    def terminate(self, name: str) -> None:
        self.send_signal(name, signal.SIGTERM)

    def freeze(self, name: str) -> None:
        """Stop a process with SIGSTOP; `resume` continues it."""
        self.send_signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self.send_signal(name, signal.SIGCONT)

    async def wait_for_exit(self, name: str, within: float = _EXIT_TIMEOUT_SECONDS) -> int:
        """Exit code of a process started here, once it has ended; negative for a signal."""
        return await asyncio.to_thread(self._processes[name].wait, within)

    # calls

    @property
    def http_url(self) -> str:
        return f"http://{self.endpoints.http}"

    @property
    def admin_url(self) -> str:
        return f"http://{self.endpoints.admin}"

    @property
    def grpc_address(self) -> str:
        return self.endpoints.grpc

    async def wait_ready(self, within: float = 100.0) -> None:
        """Wait until the coordinator serves. Fails at once when a process started here ended
        instead."""
        pids = {
            process.pid: name for name, process in self._processes.items() if process.poll() is None
        }
        async with asyncio.timeout(within):
            ended = await await_unless_exit(health.wait_until_serving(self.grpc_address), pids)
        assert ended is None, f"{pids[ended]} ended before the cluster was ready"

    async def generate(self, prompt: Sequence[int] | str, **fields: Any) -> GenerateAnswer:
        """One request by gRPC, streamed. `fields` are those of GenerateRequest, `deadline` in
        seconds, and `api_key` if it is not the cluster's."""
        async with self.stream_generate(prompt, **fields) as call:
            return await collect_answer(call)

    def stream_generate(
        self, prompt: Sequence[int] | str, **fields: Any
    ) -> AbstractAsyncContextManager[GenerateCall]:
        """The call of one request: iterate over its responses, or `cancel()` it."""
        return stream_generate(
            self.grpc_address, prompt, **{"api_key": self.config.api_key, **fields}
        )

    async def get_status(self) -> cluster_pb2.StatusResponse:
        answer: cluster_pb2.StatusResponse = await self._call_cluster_service(
            "Status", cluster_pb2.StatusRequest()
        )
        return answer

    async def get_ledgers(self) -> cluster_pb2.LedgerResponse:
        answer: cluster_pb2.LedgerResponse = await self._call_cluster_service(
            "Ledger", cluster_pb2.LedgerRequest()
        )
        return answer

    async def arm_failpoints(self, node: str, spec: str) -> None:
        """Arm failpoints on the processes whose name begins with `node`; an empty spec disarms."""
        request = cluster_pb2.ArmFailpointsRequest(node=node, spec=spec)
        answer = await self._call_cluster_service("ArmFailpoints", request)
        assert answer.nodes >= 1, f"no node is called {node}"

    async def wait_status(
        self, holds: Callable[[cluster_pb2.StatusResponse], bool], within: float = 60.0
    ) -> cluster_pb2.StatusResponse:
        """Wait until the coordinator's status has a property; also through a restart of the
        coordinator."""
        deadline = time.monotonic() + within
        while True:
            answer = await none_if_unavailable(self.get_status())
            if answer is not None and holds(answer):
                return answer
            assert time.monotonic() < deadline, f"not so after {within:g} s: {answer}"
            await asyncio.sleep(0.05)

    async def wait_idle(self, within: float = 60.0) -> cluster_pb2.LedgerResponse:
        """Wait until every node answers, every ledger balances, and nothing is held anywhere.
        Returns the ledgers; a cluster that stays busy is an AssertionError that quotes them."""
        deadline = time.monotonic() + within
        while True:
            answer = await self.get_ledgers()
            busy = _find_busy(answer)
            if not busy:
                return answer
            assert time.monotonic() < deadline, f"still busy after {within:g} s: {busy}"
            await asyncio.sleep(0.05)

    # logs

    def log_tail(self, name: str) -> str:
        """The end of a process's log."""
        return "\n".join(self.logs.last_lines(name)) if self.logs.log_path(name).exists() else ""

    def print_logs(self) -> None:
        for path in sorted(self.logs.folder.glob("*.log")):
            sys.stdout.write(f"--- {path.stem} ---\n{self.log_tail(path.stem)}\n")

    # inside

    def _child_command(self, name: str) -> tuple[str, dict[str, str]]:
        spec = self._specs[name]
        own = {
            key if key.isupper() else f"BATON_{key.upper()}": str(value)
            for key, value in self._process_variables(name)
        }
        return spec.module, {**spec.environ, **own}

    def _process_variables(self, name: str) -> Iterable[tuple[str, object]]:
        return self.per_node.get(name, {}).items()

    def _up_environ(self) -> dict[str, str]:
        """The settings of the whole cluster, as any child of ours gets them, for `baton up` to
        resolve again."""
        environ = self._specs[child_specs.COORDINATOR].environ
        return {
            key: value
            for key, value in environ.items()
            if key not in ("BATON_SUPERVISOR_PID", "OMP_NUM_THREADS")
        }

    def _all_pids(self) -> list[int]:
        return find_pids("BATON_STATE_DIR", self.config.state_dir)

    def _stop_all(self) -> None:
        """The coordinator (or the supervisor) first, as `up` does it."""
        for names in ([SUPERVISOR, child_specs.COORDINATOR], list(self._processes)):
            running = {
                name: p for name in names if (p := self._processes.get(name)) and p.poll() is None
            }
            for process in running.values():
                process.send_signal(signal.SIGCONT)
                process.terminate()
            for name, process in running.items():
                try:
                    process.wait(self.config.drain_timeout + _EXIT_TIMEOUT_SECONDS)
                except subprocess.TimeoutExpired:
                    self.ignored_sigterm.append(name)
                    process.kill()
                    process.wait()

    async def _call_cluster_service(self, method: str, request: Any) -> Any:
        return await call_cluster_service(
            self.grpc_address, method, request, admin_token=self.config.admin_token
        )


def _config(settings: Mapping[str, Any], folder: Path, segment_dir: Path) -> Config:
    own = {"state_dir": str(folder), "segment_dir": str(segment_dir)}
    return Config(**{**DEFAULT_SETTINGS, **own, **settings})


def _process_name(pid: int) -> str:
    """The name of a process of a cluster, "" for any other."""
    module = read_module(pid)
    return {"coordinator": child_specs.COORDINATOR, "baton.cli": SUPERVISOR}.get(
        module
    ) or read_environ(pid).get("BATON_NAME", "")


def _find_busy(answer: cluster_pb2.LedgerResponse) -> list[str]:
    """Ledger faults, and every owner of a block that is not cached."""
    owners = [
        f"{ledger.node}: {owner.owner} {owner.state} {owner.blocks} blocks "
        f"for {owner.age_seconds:.1f} s"
        for ledger in answer.ledgers
        for owner in ledger.owners
        if owner.state in OWNED_STATES
    ]
    return find_ledger_faults(answer.ledgers, answer.silent) + owners
