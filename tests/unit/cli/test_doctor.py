"""Every check of `baton doctor` on bad input, and the whole command on a good machine."""

import compileall
import errno
import fcntl
import json
import os
import shutil
import socket
import sys
from pathlib import Path

import grpc
import pytest

from baton.cli.checks import machine, network, shared_memory
from baton.cli.checks import model as model_checks
from baton.cli.checks.finding import Finding
from baton.cli.supervisor.memory_plan import is_sized_on_gpu
from baton.config.settings import Config
from baton.errors import ConfigError
from baton.pb import cluster_pb2
from baton.shared_memory import segment
from baton.shared_memory.available_memory import AvailableMemory
from baton.shared_memory.memory_map import HUGE_PAGE
from baton.version import package_version
from node_engine import probe
from tests.models import build_model
from tests.unit.cli.conftest import FakeCoordinatorServer, Run
from tests.unit.cli.findings import PROBE_RESULT, assert_finding

GIB = 1 << 30


def test_python() -> None:
    assert_finding(machine.check_python((3, 10, 1)), "bad", "3.10.1", "3.11 or newer")
    assert_finding(machine.check_python((3, 12, 0)), "ok")


def test_modules_that_are_compiled_at_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "uncompiled_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = machine.check_python(package=package.name)
    assert_finding(found, "warning", "PYTHONDONTWRITEBYTECODE", f"compileall -q {tmp_path}")
    compileall.compile_dir(tmp_path, quiet=1)
    assert_finding(machine.check_python(package=package.name), "ok")
    (package / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc").unlink()
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # the next import compiles
    assert_finding(machine.check_python(package=package.name), "ok")


def test_torch() -> None:
    assert_finding(machine.check_torch({"error": "it died"}), "bad", "it died")
    assert_finding(
        machine.check_torch({"torch": {"error": "ImportError: libc10"}}),
        "bad",
        "libc10",
        "pip install",
    )
    assert_finding(machine.check_torch(PROBE_RESULT), "ok", "2")


def test_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_finding(
        machine.check_curve("4.3", False), "bad", "without CURVE", "--force-reinstall pyzmq"
    )
    assert_finding(machine.check_encryption(), "ok", "with CURVE")
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert_finding(machine.check_encryption(), "bad", "pyzmq cannot be loaded")


def test_cores() -> None:
    assert_finding(
        machine.check_cores(Config(prefill=4, decode=4), 2),
        "warning",
        "2 cores, 8 nodes",
        "--prefill",
    )
    assert_finding(machine.check_cores(Config(threads="2"), 2), "ok", "2 nodes with 2 threads")
    assert_finding(machine.check_cores(Config(threads="2", cpu_kernels="torch"), 2), "warning")
    assert_finding(machine.check_cores(Config(threads="many"), 2), "bad", "'many'")
    assert_finding(machine.check_cores(Config(prefill=4, decode=4, engine="paced"), 2), "ok")


def test_open_files() -> None:
    assert_finding(machine.check_open_files(Config(), 100), "bad", "100 per process", "ulimit -n")
    assert_finding(
        machine.check_open_files(Config(), 1024),
        "warning",
        "--max-queue",
        "http 298",
        "grpc 224",
        "ulimit -n",
    )
    assert_finding(machine.check_open_files(Config(), 65536), "ok", "connections at most: http ")
    assert_finding(
        machine.check_open_files(Config(max_connections=5000), 1024),
        "bad",
        "max_connections is 5000",
        "ulimit -n",
    )


def test_connections_that_were_closed_are_shown() -> None:
    refused = 'baton_connections_refused_total{port="%s"}'
    status = cluster_pb2.StatusResponse(counters={refused % "http": 17, refused % "grpc": 0})
    (finding,) = network.check_connections(status)
    assert_finding(finding, "warning", 'port="http": 17', "--max-connections")
    assert "grpc" not in finding.detail
    assert (
        network.check_connections(cluster_pb2.StatusResponse(counters={refused % "http": 0})) == []
    )
    assert network.check_connections(None) == []


def test_unusable_segment_folder(tmp_path: Path) -> None:
    [only] = shared_memory.check_segment_folder(Config(segment_dir=str(tmp_path / "nowhere")))
    assert_finding(only, "bad", "No such file", "--segment-dir")


@pytest.mark.parametrize(
    ("number", "word"), [(errno.ENOSPC, "--shm-size"), (errno.EOPNOTSUPP, "--segment-dir")]
)
def test_full_segment_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, word: str
) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert_finding(shared_memory.check_writable(tmp_path), "bad", os.strerror(number), word)


def room(left: int) -> AvailableMemory:
    return AvailableMemory(left, "free", reserve_bytes=left // 8)


def test_memory_of_gpu_nodes_is_not_planned_by_the_host() -> None:
    """A share of 0.6 is one of the GPU; a size is one on the host, too."""
    for kv_memory in ("auto", "0.6"):
        finding = shared_memory.check_memory(
            Config(device="cuda", kv_memory=kv_memory), room(8 * GIB)
        )
        assert_finding(finding, "ok")
        assert "sized by the memory of their GPU" in finding.detail
    assert_finding(
        shared_memory.check_memory(Config(device="cuda", kv_memory="4GiB"), room(8 * GIB)), "bad"
    )


def test_memory_of_nodes_that_may_find_a_gpu(tmp_path: Path) -> None:
    driver = tmp_path / "version"
    assert not is_sized_on_gpu(Config(), driver)
    driver.touch()
    assert is_sized_on_gpu(Config(), driver)
    assert not is_sized_on_gpu(Config(device="cpu"), driver)
    assert not is_sized_on_gpu(Config(engine="paced"), driver)
    assert not is_sized_on_gpu(Config(kv_memory="1GiB"), driver)


def test_memory() -> None:
    assert_finding(
        shared_memory.check_memory(Config(kv_memory="4GiB", pool_memory="0"), room(8 * GIB)),
        "bad",
        "2 nodes with 4.0GiB each are 8.0GiB; 8.0GiB free, 1.0GiB kept in reserve",
        "--kv-memory 3.1GiB",
    )
    assert_finding(
        shared_memory.check_memory(Config(kv_memory="1GiB", pool_memory="7GiB"), room(8 * GIB)),
        "bad",
        "",
        "--pool-memory",
    )
    assert_finding(
        shared_memory.check_memory(Config(kv_memory="lots"), room(8 * GIB)), "bad", "'lots'"
    )
    assert_finding(
        shared_memory.check_memory(Config(), room(64 << 20)),
        "warning",
        "2 nodes with 6MiB",
        "--shm-size",
    )
    assert_finding(shared_memory.check_memory(Config(), room(24 * GIB)), "ok")


def test_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_finding(shared_memory.check_locks(tmp_path), "ok")
    monkeypatch.setattr(shared_memory, "_try_lock_file", lambda fd: True)
    assert_finding(shared_memory.check_locks(tmp_path), "bad", "have no effect")

    def unknown(fd: int) -> bool:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(shared_memory, "_try_lock_file", unknown)
    assert_finding(shared_memory.check_locks(tmp_path), "bad", "Invalid argument")


def test_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_finding(shared_memory.huge_pages_finding(tmp_path, False), "warning", "6.1 or newer")
    assert shared_memory.check_huge_pages(tmp_path).level in ("ok", "warning")
    assert list(tmp_path.iterdir()) == []

    def refuse(*_: object) -> None:
        raise ConfigError("no room")

    monkeypatch.setattr(segment, "create_segment", refuse)
    assert_finding(shared_memory.check_huge_pages(tmp_path), "bad", "no room")


def test_stale_segments_are_reported_and_kept(tmp_path: Path) -> None:
    assert_finding(shared_memory.check_stale_segments(tmp_path), "ok")
    dead, alive = (tmp_path / f"baton-arena-{digit * 32}" for digit in "ab")
    for path in (dead, alive, tmp_path / "baton-other"):
        with path.open("wb") as file:
            file.truncate(HUGE_PAGE)
    with alive.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert_finding(shared_memory.check_stale_segments(tmp_path), "warning", "1 in", "2MiB")
        assert segment.list_stale_segments(tmp_path) == [dead.name]
    assert len(list(tmp_path.iterdir())) == 3


# the model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_model("llama", tmp_path)


def check_model_in_process(config: Config) -> list[Finding]:
    """Check the model in this process, with the code that loads it."""
    arguments = model_checks.probe_arguments(config)
    found = (
        {"model": probe.check_model_folder(arguments[0], weights=len(arguments) == 1)}
        if arguments
        else {}
    )
    return model_checks.check_model(config, found)


def test_valid_model(model: Path) -> None:
    first, second = check_model_in_process(Config(model=str(model)))
    assert_finding(first, "ok", "sound")
    assert_finding(second, "ok", "tokenizer.json")
    (model / "tokenizer.json").unlink()
    assert_finding(
        check_model_in_process(Config(model=str(model)))[1], "warning", "has none of tokenizer.json"
    )


def test_broken_models(model: Path, tmp_path: Path) -> None:
    assert_finding(
        check_model_in_process(Config(model=str(tmp_path / "nowhere")))[0], "bad", "there is no"
    )
    assert_finding(check_model_in_process(Config(model="somebody/something"))[0], "warning", "hub")
    weights = next(model.glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert_finding(check_model_in_process(Config(model=str(model)))[0], "bad", "safetensors")
    weights.unlink()
    assert_finding(
        check_model_in_process(Config(model=str(model)))[0], "bad", "--load-format dummy"
    )
    assert_finding(check_model_in_process(Config(model=str(model), load_format="dummy"))[0], "ok")
    (model / "config.json").write_text("{")
    assert_finding(check_model_in_process(Config(model=str(model)))[0], "bad", "config.json")
    shutil.rmtree(model)
    model.mkdir()
    assert_finding(check_model_in_process(Config(model=str(model)))[0], "bad", "no such file")


def test_a_model_whose_folder_cannot_be_searched(tmp_path: Path) -> None:
    # Root may search every folder, so a name that is too long stands for one that it may not.
    config = Config(model=str(tmp_path / ("n" * 256)))
    assert_finding(check_model_in_process(config)[0], "bad", "File name too long")


def test_no_model_is_needed() -> None:
    assert_finding(check_model_in_process(Config(engine="paced"))[0], "ok", "paced")
    assert_finding(check_model_in_process(Config())[0], "ok", "its own")
    assert_finding(model_checks.check_model(Config(model="/"), {})[0], "bad", "see torch")


# the network


def test_a_port_in_use() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        config = Config(port=listening.getsockname()[1], grpc_port=0, admin_port=0)
        assert_finding(network.check_ports(config, occupied=False), "bad", "choose another --port")
        assert_finding(network.check_ports(config, occupied=True), "ok", "a cluster runs here")
    assert_finding(
        network.check_ports(Config(port=0, grpc_port=0, admin_port=0), occupied=False), "ok"
    )


def test_the_cluster_that_answers(coordinator: FakeCoordinatorServer) -> None:
    assert_finding(network.check_cluster("here:1", None), "ok", "none answers")
    coordinator.status = cluster_pb2.StatusResponse(
        ready=False, reason="there is no decode node", version="9"
    )
    config = Config(port=0, grpc_port=0, admin_port=0)
    assert_finding(
        network.check_network(config, coordinator.endpoint)[0], "warning", "there is no decode node"
    )
    coordinator.status.ready = True
    assert_finding(
        network.check_network(config, coordinator.endpoint)[0],
        "warning",
        "version 9",
        "the same version",
    )
    coordinator.status.version = package_version()
    assert_finding(network.check_network(config, coordinator.endpoint)[0], "ok", "ready")


def test_cluster_that_refuses_status(coordinator: FakeCoordinatorServer) -> None:
    coordinator.error = (grpc.StatusCode.UNAUTHENTICATED, "a key is needed")
    assert_finding(
        network.check_network(Config(port=0, grpc_port=0, admin_port=0), coordinator.endpoint)[0],
        "warning",
        "--admin-token",
    )


# the command


@pytest.fixture
def fake_node_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "run_node_probe", lambda arguments: PROBE_RESULT)


@pytest.mark.usefixtures("fake_node_probe")
def test_doctor_exits_by_what_is_bad(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    nobody = ("--endpoint", "127.0.0.1:1", "--port", "0", "--grpc-port", "0", "--admin-port", "0")
    assert (
        run("doctor", "--segment-dir", str(tmp_path), "--prefill", "3", *nobody) == 0
    )  # warnings do not count
    assert "slow each other down" in capsys.readouterr().out
    assert run("doctor", "--json", "--segment-dir", str(tmp_path / "no"), *nobody) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is False
    assert [check["name"] for check in shown["checks"] if check["level"] == "bad"] == [
        "segment folder"
    ]
    assert all(check["fix"] for check in shown["checks"] if check["level"] != "ok")


@pytest.mark.slow
def test_the_probe_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine.run_node_probe([])
    assert found.keys() == {"torch", "triton", "gpus", "driver", "native_kernels"}
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "ended with 1" in machine.run_node_probe([])["error"]
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert "FileNotFoundError" in machine.run_node_probe([])["error"]
