"""Starts processes of Baton for tests by forking one that has imported everything.

Importing torch, grpc and the rest takes a process one to three seconds of CPU, and the test suite
starts hundreds of processes. `start_process` asks a server, a Python process with a single thread,
to fork. The child has its own environment, output and session, and runs `python -m MODULE` from
there on; /proc shows the server's command line and environment for it. Tests of those, of `baton
up`, or of variables that libraries read when they are imported start interpreters instead.
"""

import atexit
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tests.processes import wait_for_exit

_PRELOADED = (
    "coordinator.__main__",
    "decode_node.__main__",
    "kv_pool.__main__",
    "prefill_node.__main__",
    "kv_kernels.reference.torch_kernels",
    "kv_pool.client.pool_client",
    "kv_pool.assemble",
    "kv_transfer.factory",
    "node_engine.model.model_engine",
    "node_engine.paced.paced_engine",
)
# Libraries read these when they are imported, so children cannot have values of their own.
_IMPORT_ENVIRON = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GRPC_VERBOSITY": "ERROR"}
_MAX_REQUEST_BYTES = 1 << 18
_ROOT = Path(__file__).resolve().parents[1]


class ForkedProcess:
    """What `subprocess.Popen` offers, for a process that `start_process` has started."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._handle = os.pidfd_open(pid)  # valid until the server has reaped the process
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        with self._lock:
            if self.returncode is None and wait_for_exit(os.dup(self._handle), 0):
                self.returncode = self._server.reap_process(self.pid)
                os.close(self._handle)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. Raises subprocess.TimeoutExpired after `timeout` s."""
        if self.poll() is None:
            wait_for_exit(os.dup(self._handle), 1e6 if timeout is None else timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_process(
    module: str,
    environ: Mapping[str, str],
    output: int,
    *,
    open_files: int = 0,
    folder: Path | None = None,
) -> ForkedProcess:
    """Run `python -m module` with this environment, and `output` as standard output and error.

    `open_files` limits its number of descriptors; 0 leaves the limit as it is. It runs in `folder`,
    or in that of this process.
    """
    server = _shared_server()
    return server.start_process(module, environ, output, open_files=open_files, folder=folder)


class ForkServer:
    """Starts the server process, which imports `preloaded`, and sends requests to it."""

    def __init__(self, preloaded: Sequence[str]) -> None:
        self._socket, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(server_end.fileno()), *preloaded],
                env={**os.environ, **_IMPORT_ENVIRON},
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[server_end.fileno()],
                start_new_session=True,
            )
        self._lock = threading.Lock()

    def start_process(
        self,
        module: str,
        environ: Mapping[str, str],
        output: int,
        *,
        open_files: int = 0,
        folder: Path | None = None,
    ) -> ForkedProcess:
        """Run a module in a forked child; see the function `start_process`."""
        request = {
            "module": module,
            "environ": dict(environ),
            "open_files": open_files,
            "folder": str(folder or Path.cwd()),
        }
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [output])
            return ForkedProcess(self, int(self._receive()))

    def reap_process(self, pid: int) -> int:
        """Exit code of a process that has ended, whose pid is free afterwards."""
        with self._lock:
            self._socket.send(json.dumps({"reap": pid}).encode())
            return int(self._receive())

    def close(self) -> None:
        """End the server, and with it the processes of Baton that still run."""
        self._socket.close()
        self._process.wait()

    def _receive(self) -> bytes:
        answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError(f"the fork server has ended with code {self._process.wait()}")
        return answer


@cache
def _shared_server() -> ForkServer:
    server = ForkServer(_PRELOADED)
    atexit.register(server.close)
    return server


def _serve(control: socket.socket, preloaded: Sequence[str]) -> None:
    """Fork children until the client closes its end of `control`."""
    for name in preloaded:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a child would miss the other threads"
    gc.collect()
    gc.freeze()  # the children's collector writes to none of the pages that they share
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 1)
        if not message:
            return
        request = json.loads(message)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            control.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _become(request, descriptors[0])
            _run_to_exit(request["module"])
        os.close(descriptors[0])
        control.send(str(pid).encode())


def _become(request: Mapping[str, Any], output: int) -> None:
    """Give this child the session, output, folder, environment and limits of its request."""
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    os.environ["BATON_SUPERVISOR_PID"] = str(os.getppid())
    if request["open_files"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (request["open_files"],) * 2)
    sys.argv = [request["module"]]


def _run_to_exit(module: str) -> NoReturn:
    """Run `python -m module`, its exit handlers too, and end this process with its exit code.

    The interpreter is not finalized: it would visit, copy and free every object of the libraries
    that the child shares with the server, which takes more CPU time than to start a node. Tests
    that start interpreters finalize them.
    """
    sys.modules.pop(f"{module}.__main__", None)  # runpy runs it anew
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
