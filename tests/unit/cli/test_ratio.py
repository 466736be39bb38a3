"""`baton ratio`, against canned answers."""

import json
from typing import Any

import grpc
import pytest

from baton.pb import cluster_pb2 as pb
from tests.unit.cli.conftest import FakeCoordinatorServer, Run

Capture = pytest.CaptureFixture[str]


def switch(phase: str, generation: int = 4, **fields: Any) -> pb.RoleSwitch:
    return pb.RoleSwitch(
        node="decode-1",
        from_role="decode",
        to_role="prefill",
        phase=phase,
        drain_seconds=1.25,
        switch_seconds=0.05,
        probe_seconds=0.5,
        generation=generation,
        **fields,
    )


def ratio(settled: bool, prefill: int = 3, generation: int = 4, **fields: Any) -> pb.Ratio:
    return pb.Ratio(
        prefill=prefill,
        decode=1,
        has_target=True,
        target_prefill=3,
        target_decode=1,
        generation=generation,
        settled=settled,
        possible="1:3, 2:2, 3:1",
        **fields,
    )


def watched(*ratios: pb.Ratio) -> list[pb.StatusResponse]:
    return [pb.StatusResponse(ready=True, ratio=ratio) for ratio in ratios]


def test_set_waits_shows_progress_and_reports_each_switch(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.ratio = ratio(False, 2)
    going = ratio(False, 2, switches=[switch("draining", placed=3)])
    done = ratio(True, over=[switch("done", generation=3), switch("done")])
    coordinator.watch_responses = watched(going, going, done)
    assert (
        run("ratio", "set", "3:1", "--flip-timeout", "2.5", "--endpoint", coordinator.endpoint) == 0
    )
    assert coordinator.requests[0] == pb.SetRatioRequest(
        prefill=3, decode=1, flip_timeout_seconds=2.5
    )
    out, err = capsys.readouterr()
    assert err == "ratio 2:1, 3:1 is asked for: 1 on their way (decode-1 draining)\n"
    assert out.splitlines() == [
        "decode-1: decode -> prefill: verified: drain 1.25 s, switch 0.05 s, probe 0.50 s",
        "ratio 3:1, as requested",
    ]


def test_set_json_and_without_waiting(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.ratio = ratio(False, 2, over=[switch("done", generation=3)])
    assert (
        run("ratio", "set", "3:1", "--no-wait", "--json", "--endpoint", coordinator.endpoint) == 0
    )
    assert [request.HasField("flip_timeout_seconds") for request in coordinator.requests] == [False]
    answer = json.loads(capsys.readouterr().out)
    assert (answer["target_prefill"], answer["settled"], answer["over"]) == (3, False, [])


def test_impossible_ratio_is_a_usage_error(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.error = (
        grpc.StatusCode.INVALID_ARGUMENT,
        "ratio 9:1 is not possible: possible are 1:3, 2:2, 3:1",
    )
    assert run("ratio", "set", "9:1", "--endpoint", coordinator.endpoint) == 2
    assert "possible are 1:3, 2:2, 3:1" in capsys.readouterr().err
    assert run("ratio", "set", "nine", "--endpoint", coordinator.endpoint) == 2
    assert "ratio 'nine' is not P:D, as in 3:1" in capsys.readouterr().err
    coordinator.error = (grpc.StatusCode.UNAUTHENTICATED, "no")
    assert run("ratio", "set", "3:1", "--endpoint", coordinator.endpoint) == 1


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (ratio(True, generation=5), "another ratio was requested meanwhile"),
        (None, "stopped before"),
    ],
)
def test_wait_fails_when_superseded_or_coordinator_stops(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture, last: pb.Ratio | None, words: str
) -> None:
    coordinator.ratio = ratio(False)
    coordinator.watch_responses = watched(ratio(False), *([last] if last else []))
    assert run("ratio", "set", "3:1", "--endpoint", coordinator.endpoint) == 1
    assert words in capsys.readouterr().err


def test_ratio_show(coordinator: FakeCoordinatorServer, run: Run, capsys: Capture) -> None:
    coordinator.ratio = ratio(
        False,
        2,
        over=[switch("lost", detail="it came back as decode")],
        switches=[switch("probing")],
        reason="manual",
    )
    assert run("ratio", "show", "--endpoint", coordinator.endpoint) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ratio 2:1, 3:1 is asked for: 1 on their way",
        "manual",
        "  decode-1: decode -> prefill: not done (it came back as decode): "
        "drain 1.25 s, switch 0.05 s, probe 0.50 s",
        "  decode-1: decode -> prefill: probing: drain 1.25 s, switch 0.05 s, probe 0.50 s",
        "possible with the live nodes: 1:3, 2:2, 3:1",
    ]
    coordinator.ratio = pb.Ratio(prefill=2, decode=2, settled=True, possible="2:2")
    assert run("ratio", "show", "--endpoint", coordinator.endpoint) == 0
    assert capsys.readouterr().out.startswith("ratio 2:2, as the nodes have joined\n")
    assert run("ratio", "show", "--json", "--endpoint", coordinator.endpoint) == 0
    assert json.loads(capsys.readouterr().out)["decode"] == 2


def test_status_and_top_show_the_ratio(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    answer = ratio(False, 2, switches=[switch("switching")])
    coordinator.status = pb.StatusResponse(ready=True, ratio=answer)
    assert run("status", "--endpoint", coordinator.endpoint) == 0
    coordinator.watch_responses = watched(answer, answer)
    assert run("top", "--once", "--endpoint", coordinator.endpoint) == 0
    line = "ratio 2:1, 3:1 is asked for: 1 on their way (decode-1 switching)"
    assert capsys.readouterr().out.count(line) == 2


def advice(prefill: int = 6) -> pb.RatioAdvice:
    forecasts = [
        pb.SplitForecast(
            prefill=generation,
            decode=8 - generation,
            ttft_p50=0.31,
            ttft_p90=0.42,
            ttft_p99=12.5,
            tpot=0.028,
            share=generation / 8,
            goodput=generation / 2,
            prefill_load=0.5,
            decode_load=1.25,
        )
        for generation in (4, 5, 6)
    ]
    return pb.RatioAdvice(
        slo="ttft=500ms,tpot=50ms",
        prefill=prefill,
        decode=8 - prefill,
        present_prefill=4,
        present_decode=4,
        reason="because",
        forecasts=forecasts,
        seconds=60,
        requests_per_second=7.25,
        burstiness=1.5,
        prompt_tokens_mean=680,
        prompt_tokens_deviation=300,
        output_tokens_mean=16,
        output_tokens_deviation=5,
        computed_share=0.9,
        prefill_tokens_per_second=4437,
        decode_tokens_per_second=116,
        queue_seconds=0.05,
        prefill_seconds=0.3,
        transfer_seconds=0.002,
        queued=3,
        waiting_prefill=2,
        ended=400,
        good=380,
    )


def test_advise_prints_demand_forecast_and_command(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.advice = advice()
    assert (
        run("ratio", "advise", "--slo", "ttft=0.5s,tpot=50ms", "--endpoint", coordinator.endpoint)
        == 0
    )
    assert coordinator.requests[0] == pb.AdviseRatioRequest(slo="ttft=500ms,tpot=50ms")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "asked in 60 s: 7.25 requests/s (burstiness 1.5), prompts of 680 ± 300 tokens, "
        "10% of them cached, "
        "answers of 16 ± 5",
        "to do: 4437 prefill tokens/s, 116 decode tokens/s; "
        "waiting: 3 in the coordinator, 2 on prefill nodes, "
        "0 on decode nodes",
        "served with 4:4: 380 of 400 within ttft=500ms,tpot=50ms; "
        "mean waits: 50 ms queue, 300 ms prefill, "
        "2 ms hand-off",
    ]
    assert [line.split() for line in lines[5:8]] == [
        ["4:4", *"310 ms / 420 ms / 12 s 28 ms 50% 2.00/s 50% / 125% present".split()],
        ["5:3", *"310 ms / 420 ms / 12 s 28 ms 62% 2.50/s 50% / 125%".split()],
        ["6:2", *"310 ms / 420 ms / 12 s 28 ms 75% 3.00/s 50% / 125% best".split()],
    ]
    assert lines[8:] == ["because", "to apply: baton ratio set 6:2"]
    coordinator.advice = advice(4)
    assert run("ratio", "advise", "--endpoint", coordinator.endpoint) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing to do"


def test_advice_as_json_and_none(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.advice = advice()
    assert run("ratio", "advise", "--json", "--endpoint", coordinator.endpoint) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["command"], answer["forecasts"][2]["prefill"]) == ("baton ratio set 6:2", 6)
    coordinator.error = (
        grpc.StatusCode.UNAVAILABLE,
        "3 requests came in the last 60 s: advice needs 20 at least",
    )
    assert run("ratio", "advise", "--endpoint", coordinator.endpoint) in (1, 3)
    assert "advice needs 20" in capsys.readouterr().err


def test_auto_and_manual(coordinator: FakeCoordinatorServer, run: Run, capsys: Capture) -> None:
    coordinator.ratio = ratio(
        True, automatic=True, slo="tpot=30ms", reason="kept: 98% are predicted", ended=50, good=49
    )
    assert (
        run(
            "ratio",
            "auto",
            "--slo",
            "tpot=30ms",
            "--flip-timeout",
            "2",
            "--endpoint",
            coordinator.endpoint,
        )
        == 0
    )
    assert coordinator.requests[-1] == pb.AutoRatioRequest(
        slo="tpot=30ms", flip_timeout_seconds=2.0
    )
    assert capsys.readouterr().out.splitlines() == [
        "ratio 3:1, as requested",
        "automatic, for tpot=30ms; 49 of 50 within it in the last minute: kept: 98% are predicted",
    ]
    coordinator.ratio = ratio(True, reason="manual: it changes when an operator says so")
    assert run("ratio", "manual", "--endpoint", coordinator.endpoint) == 0
    assert coordinator.requests[-1] == pb.ManualRatioRequest()
    assert capsys.readouterr().out.splitlines()[1] == "manual: it changes when an operator says so"


@pytest.mark.parametrize("command", ["advise", "auto"])
@pytest.mark.parametrize("slo", ["fast", "ttft=5", "ttft=1s,ttft=2s", "ttft=0ms"])
def test_malformed_slo_is_a_usage_error(run: Run, capsys: Capture, command: str, slo: str) -> None:
    assert run("ratio", command, "--slo", slo) == 2
    assert "is not ttft=TIME,tpot=TIME" in capsys.readouterr().err
