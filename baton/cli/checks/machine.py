"""Python, the libraries, cores and open files."""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from baton.cli.checks.finding import Finding, bad, ok, warning
from baton.cli.checks.installation import reinstall, set_up_with
from baton.cli.plan import threads_per_node
from baton.config import Config
from baton.connection_limits import COORDINATOR_PORTS, MOST_DESCRIPTORS, port_limit
from baton.errors import ConfigError

OLDEST_PYTHON = (3, 11)
PROBE_TIMEOUT = 120.0  # seconds: a cold import of torch
_FEW_FILES = 256


def python_version(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    shown = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        return bad("python", f"this is {shown}", set_up_with("/path/to/python3.11"))
    return ok("python", shown)


def probe(arguments: Sequence[str]) -> dict[str, Any]:
    """What a node process finds here (node_engine/probe.py), asked in a process of its own."""
    command = [sys.executable, "-m", "node_engine.probe", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PROBE_TIMEOUT)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        return {"error": f"ended with {error.returncode}: {error.stderr.strip()[-300:]}"}
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return found


def torch_library(found: Mapping[str, Any]) -> Finding:
    if "error" in found:
        return bad("torch", f"the process that looks for it failed: {found['error']}", reinstall())
    torch = found["torch"]
    return bad("torch", torch["error"], reinstall()) if "error" in torch else ok("torch", torch["version"])


def device(found: Mapping[str, Any], wanted: str) -> Finding:
    """`wanted` is --device."""
    gpus = found.get("gpus", [])
    if gpus:
        return ok("device", f"{len(gpus)} GPU: {', '.join(gpus[:8])}")
    if wanted == "cuda":
        fix = "check nvidia-smi, install torch with CUDA, or use --device cpu"
        return bad("device", "--device cuda, and torch sees no GPU", fix)
    return ok("device", "no GPU: models run on the CPU")


def triton_library(found: Mapping[str, Any]) -> Finding:
    """Needed on GPUs alone."""
    triton = found.get("triton", {"error": "not looked for"})
    if "version" in triton:
        return ok("triton", triton["version"])
    if found.get("gpus"):
        told = f"there are GPUs, and it cannot be loaded: {triton['error']}"
        return bad(
            "triton", told, "install a CUDA build of torch, which brings it: pip install --force-reinstall torch"
        )
    return ok("triton", "not there; a CPU needs none")


def encryption() -> Finding:
    """The transfer links between nodes are encrypted by libzmq's CURVE."""
    try:
        import zmq
    except ImportError as error:
        return bad("libzmq", f"pyzmq cannot be loaded: {error}", reinstall())
    return curve(zmq.zmq_version(), bool(zmq.has("curve")))


def curve(version: str, there: bool) -> Finding:
    if there:
        return ok("libzmq", f"{version} with CURVE")
    return bad("libzmq", f"{version} without CURVE", "use pyzmq's own wheels: pip install --force-reinstall pyzmq")


def cores(config: Config, available: int) -> Finding:
    nodes = config.prefill + config.decode
    try:
        threads = threads_per_node(config.threads, nodes, available)
    except ConfigError as error:
        return bad("cores", error.message, "set --threads")
    told = f"{available} cores, {nodes} nodes with {threads} threads each"
    if nodes * threads > available and config.engine == "model" and config.device != "cuda":
        return warning(
            "cores", f"{told}: they slow each other down", "use fewer nodes (--prefill, --decode) or --threads"
        )
    return ok("cores", told)


def open_files(config: Config, limit: int | None = None) -> Finding:
    """Every client, every node and every segment takes one. Processes of ours raise the soft limit to the hard one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if limit is None else limit
    usable = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    wanted = _files_for(config)
    fix = f"ulimit -n {wanted} (or LimitNOFILE= of the service)"
    try:
        limits = {name: port_limit(name, usable, most=config.max_connections) for name in COORDINATOR_PORTS}
    except ConfigError as error:
        return bad("open files", error.message, fix)
    shares = ", ".join(f"{name} {limit.most}" for name, limit in limits.items())
    told = f"{usable} per process; connections at most: {shares}"
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        return ok("open files", told)
    if usable < _FEW_FILES:
        return bad("open files", told, fix)
    return warning("open files", f"{told}: fewer than --max-queue allows clients", fix)


def _files_for(config: Config) -> int:
    """The limit at which the HTTP port may hold a client for each request that may wait or run."""
    clients = config.max_queue + config.max_num_seqs * config.decode
    wanted = clients
    while port_limit("http", wanted).most < clients and wanted < MOST_DESCRIPTORS:
        wanted *= 2
    return wanted
