import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.cli.common.unavailable import UNAVAILABLE_COMMANDS
from baton.pb import cluster_pb2, common_pb2, generation_pb2
from tests.unit.cli.conftest import FakeCoordinatorServer, Run, make_timeline

Capture = pytest.CaptureFixture[str]


def answers() -> list[generation_pb2.GenerateResponse]:
    last = generation_pb2.GenerateResponse(
        request_id="r",
        text=" lô",
        token_ids=[3],
        finish_reason=common_pb2.FINISH_REASON_LENGTH,
        usage=generation_pb2.Usage(prompt_tokens=4, completion_tokens=3),
        timeline=make_timeline(),
    )
    return [generation_pb2.GenerateResponse(request_id="r", text="Hal", token_ids=[1, 2]), last]


def test_generate_writes_the_answer_and_nothing_else(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.answers = answers()
    options = (
        "--max-tokens",
        "3",
        "--temperature",
        "0.5",
        "--seed",
        "7",
        "--ignore-eos",
        "--top-k",
        "5",
    )
    assert (
        run(
            "generate",
            "Say hi",
            *options,
            "--endpoint",
            coordinator.endpoint,
            "--api-key",
            "sesame",
        )
        == 0
    )
    assert capsys.readouterr() == ("Hal lô\n", "")
    assert coordinator.requests == [
        generation_pb2.GenerateRequest(
            text="Say hi", max_tokens=3, temperature=0.5, seed=7, top_k=5, ignore_eos=True
        )
    ]
    assert coordinator.metadata["authorization"] == "Bearer sesame"


def test_generate_omits_unset_sampling_fields(coordinator: FakeCoordinatorServer, run: Run) -> None:
    coordinator.answers = answers()
    assert run("generate", "x", "--endpoint", coordinator.endpoint) == 0
    [request] = coordinator.requests
    assert not any(
        request.HasField(name) for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")
    )


def test_generate_json_is_one_object_with_numbers_as_numbers(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.answers = answers()
    assert run("generate", "x", "--json", "--endpoint", coordinator.endpoint) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["text"], shown["token_ids"], shown["finish_reason"]) == (
        "Hal lô",
        [1, 2, 3],
        "length",
    )
    assert shown["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "cached_tokens": 0}
    assert shown["timeline"]["handoff"]["bytes"] == 2**40


def test_generate_timeline_goes_beside_the_answer(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.answers = answers()
    assert run("generate", "x", "--timeline", "--endpoint", coordinator.endpoint) == 0
    out, err = capsys.readouterr()
    assert out == "Hal lô\n"
    assert re.search(r"prefill\s+100\.0", err)
    assert "75% landed before" in re.sub(r"\s+", " ", err)


def test_an_error_of_the_cluster_is_one_line_and_exit_1(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.error = (grpc.StatusCode.INVALID_ARGUMENT, "temperature is 9: it must be 0 to 2")
    assert run("generate", "x", "--endpoint", coordinator.endpoint) == 1
    assert capsys.readouterr() == (
        "",
        "error: temperature is 9: it must be 0 to 2 (invalid_argument)\n",
    )


@pytest.mark.parametrize("command", [("generate", "x"), ("status",), ("audit",)])
def test_unreachable_cluster_is_exit_3(run: Run, capsys: Capture, command: tuple[str, ...]) -> None:
    with (
        socket.socket() as held
    ):  # bound, not listening: nobody answers, and nobody else takes the port
        held.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{held.getsockname()[1]}"
        assert run(*command, "--endpoint", endpoint) == 3
    assert re.fullmatch(f"error: no cluster answers at {endpoint}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("ready", [True, False])
def test_status_tells_readiness_by_exit_code(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture, ready: bool
) -> None:
    stats = cluster_pb2.NodeStats(blocks_total=64, blocks_free=60)
    node = cluster_pb2.NodeStatus(name="decode-0", role="decode", pid=42, stats=stats)
    coordinator.status = cluster_pb2.StatusResponse(
        ready=ready, reason="" if ready else "no decode node", nodes=[node]
    )
    assert run("status", "--endpoint", coordinator.endpoint, "--admin-token", "t") == (
        0 if ready else 1
    )
    out = capsys.readouterr().out
    assert "decode-0" in out
    assert ("no decode node" in out) is not ready
    assert coordinator.metadata["authorization"] == "Bearer t"
    assert run("status", "--json", "--endpoint", coordinator.endpoint) == (0 if ready else 1)
    assert json.loads(capsys.readouterr().out)["nodes"][0]["stats"]["blocks_free"] == 60


def test_status_says_how_full_a_pools_disk_is(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    counters = {"baton_pool_disk_slots": 640.0, "baton_pool_disk_slots_used": 100.0}
    pool = cluster_pb2.NodeStatus(
        name="pool-0", role="pool", stats=cluster_pb2.NodeStats(counters=counters)
    )
    coordinator.status = cluster_pb2.StatusResponse(ready=True, nodes=[pool])
    assert run("status", "--endpoint", coordinator.endpoint) == 0
    assert "pool-0: 100 of 640 disk slots used" in capsys.readouterr().out


def device_nodes() -> list[cluster_pb2.NodeStatus]:
    """A node on a GPU that computes, one on a CPU, and one that has reported nothing yet."""
    gpu = cluster_pb2.DeviceReport(
        device="cuda:0",
        name="NVIDIA H200",
        memory_total_bytes=141 << 30,
        memory_used_bytes=100 << 30,
        mfu=0.412,
        mbu=0.0,
    )
    cpu = cluster_pb2.DeviceReport(device="cpu", name="AMD EPYC", threads=8)
    stats = [cluster_pb2.NodeStats(device=device) for device in (gpu, cpu)]
    return [
        cluster_pb2.NodeStatus(name="decode-0", role="decode", stats=stats[0]),
        cluster_pb2.NodeStatus(name="decode-1", role="decode", stats=stats[1]),
        cluster_pb2.NodeStatus(name="prefill-0", role="prefill"),
    ]


@pytest.mark.parametrize("command", [("status",), ("top", "--once")])
def test_devices_are_shown(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture, command: tuple[str, ...]
) -> None:
    coordinator.status = cluster_pb2.StatusResponse(ready=True, nodes=device_nodes())
    coordinator.watch_responses = [coordinator.status] * 2
    assert run(*command, "--endpoint", coordinator.endpoint) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[-3:] == [
        "node device name memory used MFU MBU",
        "decode-0 cuda:0 NVIDIA H200 100.0GiB of 141.0GiB 41.2% 0.0%",
        "decode-1 cpu AMD EPYC, 8 threads - - -",
    ]


def test_status_shows_degradation_steps(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.status = cluster_pb2.StatusResponse(
        ready=True,
        pressure=1.25,
        notices=["degraded (shed_lowest): new requests of the lowest class are refused"],
        degradation=[
            cluster_pb2.DegradationStep(step="shed_lowest", active=True, seconds=7.0),
            cluster_pb2.DegradationStep(
                step="smaller_token_budget", cannot_help="no tenant has tokens_per_second"
            ),
            cluster_pb2.DegradationStep(step="capped_output"),
        ],
    )
    assert run("status", "--endpoint", coordinator.endpoint) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "degraded (shed_lowest): new requests of the lowest class are refused" in out
    assert "pressure 1.25, given up: shed_lowest for 7 s, next at 1: capped_output" in out
    del coordinator.status.degradation[2], coordinator.status.degradation[0]
    assert run("status", "--endpoint", coordinator.endpoint) == 0
    assert "pressure 1.25, next at 1: no step available" in capsys.readouterr().out


def ledger(**counts: Any) -> common_pb2.Ledger:
    return common_pb2.Ledger(node="decode-0", incarnation="i", total=10, **counts)


def audit_json(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> tuple[int, list[str]]:
    code = run("audit", "--json", "--settle", "0", "--endpoint", coordinator.endpoint)
    return code, json.loads(capsys.readouterr().out)["faults"]


def test_audit_passes_a_ledger_that_balances(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.ledger = cluster_pb2.LedgerResponse(ledgers=[ledger(free=4, cached=6)])
    assert audit_json(coordinator, run, capsys) == (0, [])


def test_audit_names_what_is_wrong(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.ledger = cluster_pb2.LedgerResponse(
        ledgers=[ledger(free=4, in_use=5)], silent=["prefill-0"]
    )
    code, faults = audit_json(coordinator, run, capsys)
    assert code == 1
    assert [line.split(":")[0] for line in faults] == ["prefill-0", "decode-0", "decode-0"]
    assert "is 9, not 10" in faults[1]
    assert "5 blocks in_use, owners account for 0" in faults[2]


def test_audit_finds_blocks_whose_request_is_gone(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    held = ledger(free=7, in_use=3)
    held.owners.add(owner="r/1.0", state="in_use", blocks=3, age_seconds=60)
    node = cluster_pb2.NodeStatus(name="decode-0", incarnation="i", placed=0)
    coordinator.status = cluster_pb2.StatusResponse(ready=True, nodes=[node])
    coordinator.ledger = cluster_pb2.LedgerResponse(ledgers=[held])
    code, faults = audit_json(coordinator, run, capsys)
    assert code == 1
    assert faults == ["decode-0: r/1.0 holds blocks in_use, and is no live request"]
    coordinator.status.nodes[0].placed = 1
    assert audit_json(coordinator, run, capsys) == (0, [])


@pytest.mark.parametrize("command", sorted(UNAVAILABLE_COMMANDS))
def test_unavailable_commands(run: Run, capsys: Capture, command: str) -> None:
    assert run(command, "anything", "--with", "options") == 1
    assert capsys.readouterr().err == f"error: baton {command} is not available in this version\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "70000"), "port is '70000'"),
        (("--mode", "sideways"), "mode is 'sideways'"),
        (("--quantize", "int4"), "quantize is 'int4'"),
        (("--set", "nonsense"), "nonsense"),
        (("--set", "colour=red"), "colour"),
        (("--threads", "many"), "threads is 'many'"),
        (("--config", "/nowhere.toml"), "/nowhere.toml"),
        (("--host", "0.0.0.0"), "--api-key is not set"),
        (("--model", "./no-such-folder"), "--model ./no-such-folder: there is no such folder"),
    ],
)
def test_wrong_settings_are_exit_2_and_name_themselves(
    run: Run, capsys: Capture, arguments: tuple[str, str], message: str
) -> None:
    assert run("up", *arguments) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_option_is_exit_2(run: Run) -> None:
    assert run("up", "--no-such-option") == 2
    assert run("no-such-command") == 2


def test_the_client_is_thin() -> None:
    """Neither a process of ours nor a library that takes seconds comes with the command line."""
    code = (
        "import sys, baton.cli.main; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    root = Path(__file__).resolve().parents[3]
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    heavy = {
        "torch",
        "transformers",
        "grpc",
        "uvloop",
        "numpy",
        "starlette",
        "httpx2",
        "zmq",
        "structlog",
    }
    ours = {
        "coordinator",
        "prefill_node",
        "decode_node",
        "node_engine",
        "kv_transfer",
        "kv_kernels",
        "offline",
        "benchmarks",
    }
    assert not (heavy | ours) & set(loaded.split())
