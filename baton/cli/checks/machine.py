"""Checks of Python, the libraries, the cores and the limit on open files."""

import importlib.util
import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.cli.checks.finding import Finding, bad_finding, ok_finding, warning_finding
from baton.cli.checks.installation import reinstall_advice, setup_advice
from baton.cli.supervisor.child_specs import check_threads
from baton.config.settings import Config
from baton.errors import ConfigError
from baton.limits import MAX_AUTO_NUM_SEQS, MAX_DESCRIPTORS
from baton.network.connection_limits import COORDINATOR_PORTS, compute_port_limit

MIN_PYTHON = (3, 11)
PROBE_TIMEOUT = 120.0  # seconds; covers a cold import of torch
_MIN_USABLE_FILES = 256  # file descriptors per process


def check_python(
    version: tuple[int, ...] = sys.version_info[:3], package: str = "torch"
) -> Finding:
    """Check Python's version, and that imports do not have to compile modules every time.

    `package` is the installed package whose bytecode is looked for; it stands for all of them.
    """
    text = ".".join(map(str, version))
    if version < MIN_PYTHON:
        return bad_finding("python", f"this is {text}", setup_advice("/path/to/python3.11"))
    if sys.dont_write_bytecode and (folder := _find_uncompiled(package)):
        return warning_finding(
            "python",
            f"{text}; PYTHONDONTWRITEBYTECODE is set and {package} is not compiled, so that each"
            " process compiles the modules that it imports and starts seconds later",
            f"unset it, or compile once: {sys.executable} -m compileall -q {folder}",
        )
    return ok_finding("python", text)


def _find_uncompiled(package: str) -> Path | None:
    """Return the folder that `package` is installed in if it has no cached bytecode, else None."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or spec.cached is None or Path(spec.cached).exists():
        return None
    return Path(spec.origin).parent.parent


def run_node_probe(arguments: Sequence[str]) -> dict[str, Any]:
    """Run node_engine/probe.py in a new process and return what it finds; see `run_probe`."""
    return run_probe("node_engine.probe", arguments, PROBE_TIMEOUT)


def run_probe(module: str, arguments: Sequence[str], timeout_seconds: float) -> dict[str, Any]:
    """Run a module in a new process and return the JSON object that is the last line it prints.

    The result has the key `error` when the process failed.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=timeout_seconds
        )
        found: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        return {"error": f"ended with {error.returncode}: {error.stderr.strip()[-300:]}"}
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return found


def check_torch(found: Mapping[str, Any]) -> Finding:
    if "error" in found:
        return bad_finding(
            "torch", f"the process that looks for it failed: {found['error']}", reinstall_advice()
        )
    torch = found["torch"]
    return (
        bad_finding("torch", torch["error"], reinstall_advice())
        if "error" in torch
        else ok_finding("torch", torch["version"])
    )


def check_encryption() -> Finding:
    """Check that libzmq has CURVE, which encrypts the transfer links between nodes."""
    try:
        import zmq
    except ImportError as error:
        return bad_finding("libzmq", f"pyzmq cannot be loaded: {error}", reinstall_advice())
    return check_curve(zmq.zmq_version(), bool(zmq.has("curve")))


def check_curve(version: str, has_curve: bool) -> Finding:
    if has_curve:
        return ok_finding("libzmq", f"{version} with CURVE")
    return bad_finding(
        "libzmq",
        f"{version} without CURVE",
        "use pyzmq's own wheels: pip install --force-reinstall pyzmq",
    )


def check_cores(config: Config, available: int) -> Finding:
    nodes = config.prefill + config.decode
    try:
        check_threads(config.threads)
    except ConfigError as error:
        return bad_finding("cores", error.message, "set --threads")
    detail = f"{available} cores, {nodes} nodes"
    threads = 1  # of each node at least: with native kernels those that compute divide the cores
    if config.threads != "auto":
        detail += f" with {config.threads} threads each"
        threads = int(config.threads) if config.cpu_kernels == "torch" else 1
    if nodes * threads > available and config.engine == "model" and config.device != "cuda":
        return warning_finding(
            "cores",
            f"{detail}: they slow each other down",
            "use fewer nodes (--prefill, --decode) or --threads",
        )
    return ok_finding("cores", detail)


def check_open_files(config: Config, limit: int | None = None) -> Finding:
    """Check that the limit on open files allows as many clients as --max-queue does.

    Every client, node and segment takes a descriptor. Baton's processes raise the soft limit to the
    hard one, so only the hard one counts. `limit` replaces it in tests.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if limit is None else limit
    usable = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    needed = _wanted_descriptors(config)
    fix = f"ulimit -n {needed} (or LimitNOFILE= of the service)"
    try:
        limits = {
            name: compute_port_limit(name, usable, max_connections=config.max_connections)
            for name in COORDINATOR_PORTS
        }
    except ConfigError as error:
        return bad_finding("open files", error.message, fix)
    shares = ", ".join(f"{name} {limit.max_connections}" for name, limit in limits.items())
    detail = f"{usable} per process; connections at most: {shares}"
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return ok_finding("open files", detail)
    if usable < _MIN_USABLE_FILES:
        return bad_finding("open files", detail, fix)
    return warning_finding("open files", f"{detail}: fewer than --max-queue allows clients", fix)


def _wanted_descriptors(config: Config) -> int:
    """Return the limit that lets the HTTP port hold a client for each queued or running request."""
    sequences = MAX_AUTO_NUM_SEQS if config.max_num_seqs == "auto" else config.max_num_seqs
    clients = config.max_queue + sequences * config.decode
    limit = clients
    while compute_port_limit("http", limit).max_connections < clients and limit < MAX_DESCRIPTORS:
        limit *= 2
    return limit
