"""`baton ratio`, against canned answers."""

import json

import grpc
import pytest

from baton.pb import cluster_pb2 as pb
from tests.unit.cli.conftest import FakeFront, Run

Capture = pytest.CaptureFixture[str]


def switch(phase: str, generation: int = 4, **fields: object) -> pb.RoleSwitch:
    return pb.RoleSwitch(
        node="decode-1", from_role="decode", to_role="prefill", phase=phase, drain_seconds=1.25, switch_seconds=0.05,
        probe_seconds=0.5, generation=generation, **fields,
    )  # fmt: skip


def ratio(settled: bool, prefill: int = 3, generation: int = 4, **fields: object) -> pb.Ratio:
    return pb.Ratio(
        prefill=prefill, decode=1, has_target=True, target_prefill=3, target_decode=1, generation=generation,
        settled=settled, possible="1:3, 2:2, 3:1", **fields,
    )  # fmt: skip


def watched(*ratios: pb.Ratio) -> list[pb.StatusResponse]:
    return [pb.StatusResponse(ready=True, ratio=each) for each in ratios]


def test_set_waits_shows_progress_and_reports_each_switch(front: FakeFront, run: Run, capsys: Capture) -> None:
    front.ratio = ratio(False, 2)
    going = ratio(False, 2, switches=[switch("draining", placed=3)])
    done = ratio(True, over=[switch("done", generation=3), switch("done")])
    front.watched = watched(going, going, done)
    assert run("ratio", "set", "3:1", "--flip-timeout", "2.5", "--endpoint", front.endpoint) == 0
    assert front.requests[0] == pb.SetRatioRequest(prefill=3, decode=1, flip_timeout_seconds=2.5)
    out, err = capsys.readouterr()
    assert err == "ratio 2:1, 3:1 is asked for: 1 on their way (decode-1 draining)\n"
    assert out.splitlines() == [
        "decode-1: decode -> prefill: verified: drain 1.25 s, switch 0.05 s, probe 0.50 s",
        "ratio 3:1, as asked for",
    ]


def test_set_json_and_without_waiting(front: FakeFront, run: Run, capsys: Capture) -> None:
    front.ratio = ratio(False, 2, over=[switch("done", generation=3)])
    assert run("ratio", "set", "3:1", "--no-wait", "--json", "--endpoint", front.endpoint) == 0
    assert [request.HasField("flip_timeout_seconds") for request in front.requests] == [False]
    told = json.loads(capsys.readouterr().out)
    assert (told["target_prefill"], told["settled"], told["over"]) == (3, False, [])


def test_what_cannot_be_is_wrong_usage(front: FakeFront, run: Run, capsys: Capture) -> None:
    front.error = (grpc.StatusCode.INVALID_ARGUMENT, "ratio 9:1 is not possible: possible are 1:3, 2:2, 3:1")
    assert run("ratio", "set", "9:1", "--endpoint", front.endpoint) == 2
    assert "possible are 1:3, 2:2, 3:1" in capsys.readouterr().err
    assert run("ratio", "set", "nine", "--endpoint", front.endpoint) == 2
    assert "ratio 'nine' is not P:D, as in 3:1" in capsys.readouterr().err
    front.error = (grpc.StatusCode.UNAUTHENTICATED, "no")
    assert run("ratio", "set", "3:1", "--endpoint", front.endpoint) == 1


@pytest.mark.parametrize(
    ("last", "words"), [(ratio(True, generation=5), "another ratio was asked for meanwhile"), (None, "stopped before")]
)
def test_a_wait_that_ends_otherwise(
    front: FakeFront, run: Run, capsys: Capture, last: pb.Ratio | None, words: str
) -> None:
    front.ratio = ratio(False)
    front.watched = watched(ratio(False), *([last] if last else []))
    assert run("ratio", "set", "3:1", "--endpoint", front.endpoint) == 1
    assert words in capsys.readouterr().err


def test_show(front: FakeFront, run: Run, capsys: Capture) -> None:
    front.ratio = ratio(
        False, 2, over=[switch("lost", detail="it came back as decode")], switches=[switch("probing")]
    )  # fmt: skip
    assert run("ratio", "show", "--endpoint", front.endpoint) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ratio 2:1, 3:1 is asked for: 1 on their way",
        "  decode-1: decode -> prefill: not done (it came back as decode): drain 1.25 s, switch 0.05 s, probe 0.50 s",
        "  decode-1: decode -> prefill: probing: drain 1.25 s, switch 0.05 s, probe 0.50 s",
        "possible with the live nodes: 1:3, 2:2, 3:1",
    ]
    front.ratio = pb.Ratio(prefill=2, decode=2, settled=True, possible="2:2")
    assert run("ratio", "show", "--endpoint", front.endpoint) == 0
    assert capsys.readouterr().out.startswith("ratio 2:2, as the nodes have joined\n")
    assert run("ratio", "show", "--json", "--endpoint", front.endpoint) == 0
    assert json.loads(capsys.readouterr().out)["decode"] == 2


def test_status_and_top_show_it(front: FakeFront, run: Run, capsys: Capture) -> None:
    told = ratio(False, 2, switches=[switch("switching")])
    front.status = pb.StatusResponse(ready=True, ratio=told)
    assert run("status", "--endpoint", front.endpoint) == 0
    front.watched = watched(told, told)
    assert run("top", "--once", "--endpoint", front.endpoint) == 0
    line = "ratio 2:1, 3:1 is asked for: 1 on their way (decode-1 switching)"
    assert capsys.readouterr().out.count(line) == 2


@pytest.mark.parametrize("command", ["advise", "auto", "manual"])
def test_what_is_not_built_says_so(run: Run, capsys: Capture, command: str) -> None:
    assert run("ratio", command, "--slo", "ttft=500ms") == 1
    assert capsys.readouterr().err == f"error: baton ratio {command} is not available in this version\n"
