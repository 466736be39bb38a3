"""explain, drain, undrain and top, against canned answers."""

import io
import json
import re

import grpc
import pytest

from baton.cli.views.counters import sum_counter
from baton.cli.views.explanation import _waterfall_bar
from baton.cli.views.progress_line import ProgressLine
from baton.cli.views.top_table import compute_rates
from baton.pb import cluster_pb2 as pb
from baton.pb import common_pb2
from tests.unit.cli.conftest import FakeCoordinatorServer, Run, make_timeline

Capture = pytest.CaptureFixture[str]


def explanation() -> pb.ExplainResponse:
    considered = [
        pb.Candidate(
            node="decode-0",
            role="decode",
            attempts=2,
            room=9,
            able=True,
            chosen=True,
            held_tokens=32,
            predicted_seconds=0.25,
        ),
        pb.Candidate(node="decode-1", role="decode", attempts=4, room=1),
        pb.Candidate(
            node="prefill-0", role="prefill", uncomputed_tokens=300, room=3, able=True, chosen=True
        ),
    ]
    refused = pb.AttemptReport(
        number=1, decode_node="decode-1", over=0.01, ended="refused", needed=8, free=1
    )
    served = pb.AttemptReport(
        number=2,
        prefill_node="prefill-0",
        decode_node="decode-0",
        placed=0.01,
        over=0.5,
        ended="served",
        context_tokens=512,
        considered=considered,
        prefill_ended=0.11,
        predicted=pb.Prediction(
            queue=0.01, prefill=0.08, transfer=0.005, step=0.03, output_tokens=8
        ),
        way="hand_off",
        why="sooner",
        other_way=pb.Prediction(queue=0.0, prefill=0.3, step=0.03, output_tokens=8),
    )
    return pb.ExplainResponse(
        request_id="r1",
        state="finished",
        finish_reason=common_pb2.FINISH_REASON_LENGTH,
        prompt_tokens=512,
        output_tokens=11,
        max_tokens=11,
        timeline=make_timeline(),
        decode=0.365,
        attempts=[refused, served],
        sources=pb.PromptSources(computed_prefill=496, local_cache=16, received=512),
    )


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_explain_shows_the_waterfall(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.explanation = explanation()
    assert run("explain", "r1", "--endpoint", coordinator.endpoint, "--admin-token", "t") == 0
    out = plain(capsys.readouterr().out)
    assert coordinator.requests == [pb.ExplainRequest(request_id="r1")]
    assert coordinator.metadata["authorization"] == "Bearer t"
    for expected in (
        "request r1: finished (length)",
        "prefill 100.0 74%",
        "time to first token 135.0",
        "decode 365.0 10 more tokens, 36.5 each",
        "512 tokens (496 computed on prefill, 16 from a node's cache; 512 of them by hand-off)",
        "75% landed before the last layer",
        "refused: needed 8 blocks, 1 were free",
        "decode-0 decode 2 - 9 32 250.0 chosen",
        "decode-1 decode 4 - 1 0 - had no room",
        "prompt computed, ms 90.0 100.0",
        "first token, ms 95.0 125.0",
        "each step, ms 30.0 36.5",
        "output, tokens 8 11",
        "prompt computed by: a prefill node, which hands it over (predicted to be sooner: "
        "first token predicted after 95.0 ms, the other way after 300.0 ms)",
    ):
        assert expected in out


def test_explain_says_that_a_prefill_node_was_not_needed(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    """Decode held the context: the node that was chosen has no part in the answer, and the way is
    decode's own."""
    coordinator.explanation = explanation()
    attempt = coordinator.explanation.attempts[-1]
    attempt.way, attempt.why = "local", "held"
    attempt.ClearField("other_way")
    assert run("explain", "r1", "--endpoint", coordinator.endpoint) == 0
    out = plain(capsys.readouterr().out)
    assert "prefill-0, not needed" in out
    assert "prompt computed by: the decode node itself (its cache has the context)" in out


def test_explain_says_what_spoke_against_a_node(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    answer = explanation()
    for because in ("failed before", "newcomer", "kept apart"):
        answer.attempts[1].considered.add(
            node=because.replace(" ", "-"), role="prefill", able=True, because=because
        )
    answer.attempts[1].held_back, answer.attempts[1].probe = 1.5, True
    coordinator.explanation = answer
    assert run("explain", "r1", "--endpoint", coordinator.endpoint) == 0
    out = plain(capsys.readouterr().out)
    for expected in (
        "served; the retry budget had held it back for 1500.0 ms; "
        "a probe of two nodes that had been kept apart",
        "failed-before prefill 0 0 0 0 - could have: its last attempt failed there",
        "newcomer prefill 0 0 0 0 - could have: it has just joined",
        "kept-apart prefill 0 0 0 0 - could have: hand-offs between the two failed",
    ):
        assert expected in out, out


def test_explain_lists_all_choices_of_an_answer(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    answer = explanation()
    failed = pb.ExplainResponse(
        request_id="r2", state="failed", error=common_pb2.Error(code="node_gone", message="m")
    )
    answer.others.extend([failed, pb.ExplainResponse(request_id="r3")])
    coordinator.explanation = answer
    assert run("explain", "r1", "--endpoint", coordinator.endpoint) == 0
    out = plain(capsys.readouterr().out)
    for expected in (
        "request r1, the first of 3 choices: finished (length)",
        "0 r1 135.0 500.0 11 prefill-0 decode-0 finished (length)",
        "1 r2 - 0.0 0 - - failed: node_gone: m",
        "2 r3 - - - - - not kept any more",
    ):
        assert expected in out, out


def test_explain_json_has_every_field(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.explanation = explanation()
    assert run("explain", "r1", "--json", "--endpoint", coordinator.endpoint) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown.keys() == {field.name for field in pb.ExplainResponse.DESCRIPTOR.fields}
    assert [attempt["ended"] for attempt in shown["attempts"]] == ["refused", "served"]


def test_a_request_that_failed_before_its_first_token(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    error = common_pb2.Error(code="deadline_exceeded", message="took [too] long")
    coordinator.explanation = pb.ExplainResponse(
        request_id="r1", state="failed", error=error, prompt_tokens=3, max_tokens=4
    )
    assert run("explain", "r1", "--endpoint", coordinator.endpoint) == 0
    out = plain(capsys.readouterr().out)
    assert "failed: deadline_exceeded: took [too] long" in out
    assert "no token yet 0.0" in out


def test_an_unknown_request_is_exit_1(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.error = (grpc.StatusCode.NOT_FOUND, "there is no request 'r9'")
    assert run("explain", "r9", "--endpoint", coordinator.endpoint) == 1
    assert capsys.readouterr().err == "error: there is no request 'r9' (not_found)\n"


@pytest.mark.parametrize("begun", [0.0, 0.3, 0.999, 1.0])
@pytest.mark.parametrize("share", [0.0, 1e-6, 0.1, 1.0])
def test_a_bar_shows_what_took_time_and_nothing_else(begun: float, share: float) -> None:
    assert bool(_waterfall_bar(begun, share).strip()) == (share > 0)


# drain


def node(service: str, placed: int = 0, blocks: int = 0, left: float = 0.0) -> pb.NodeStatus:
    stats = pb.NodeStats(blocks_total=8, blocks_in_use=blocks)
    return pb.NodeStatus(
        name="d0",
        role="decode",
        service=service,
        placed=placed,
        stats=stats,
        drain_seconds_left=left,
    )


def statuses(*nodes: pb.NodeStatus | None) -> list[pb.StatusResponse]:
    return [pb.StatusResponse(ready=True, nodes=[node] if node else []) for node in nodes]


def test_drain_waits_until_the_node_is_empty(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.drain_response = pb.DrainResponse(
        node="d0", service="draining", warning="there is no decode node"
    )
    coordinator.watch_responses = statuses(
        node("draining", 2, 5, 9.0), node("draining", 2, 5, 9.0), node("draining"), node("drained")
    )
    assert run("drain", "d0", "--timeout", "9.5", "--endpoint", coordinator.endpoint) == 0
    out, err = capsys.readouterr()
    assert coordinator.requests[0] == pb.DrainRequest(node="d0", timeout_seconds=9.5)
    assert err.splitlines() == [
        "warning: there is no decode node",
        "d0: 2 requests, 5 blocks held, what is left in 9 s is placed again",
        "d0: 0 requests, 0 blocks held",
    ]
    assert out == "d0 is drained: nothing is left there\n"


def test_drain_without_a_time_sends_none_and_need_not_wait(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.drain_response = pb.DrainResponse(node="d0", service="draining")
    assert run("drain", "d0", "--no-wait", "--json", "--endpoint", coordinator.endpoint) == 0
    assert [request.HasField("timeout_seconds") for request in coordinator.requests] == [False]
    assert json.loads(capsys.readouterr().out) == {"node": "d0", "service": "draining"}


@pytest.mark.parametrize(
    ("last", "code", "words"),
    [
        (None, 0, "has left the cluster"),
        (node("in"), 1, "put back into service"),
        (node("draining"), 1, "stopped"),
    ],
)
def test_drain_that_is_interrupted_or_undone(
    coordinator: FakeCoordinatorServer,
    run: Run,
    capsys: Capture,
    last: pb.NodeStatus | None,
    code: int,
    words: str,
) -> None:
    coordinator.watch_responses = statuses(node("draining", 1), last)
    assert run("drain", "d0", "--endpoint", coordinator.endpoint) == code
    assert words in "".join(capsys.readouterr())


def test_undrain(coordinator: FakeCoordinatorServer, run: Run, capsys: Capture) -> None:
    coordinator.drain_response = pb.DrainResponse(node="d0", service="in")
    assert run("undrain", "d0", "--endpoint", coordinator.endpoint) == 0
    assert capsys.readouterr().out == "d0 is in service\n"
    assert coordinator.requests == [pb.UndrainRequest(node="d0")]


def test_progress_in_place_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with ProgressLine(stream) as progress:
        for line in ("two left", "two left", "one left"):
            progress.show_line(line)
    assert stream.getvalue() == "\r\x1b[Ktwo left\r\x1b[Kone left\r\x1b[K"
    with ProgressLine(None) as progress:
        progress.show_line("nowhere")


# top


def status(seconds: float, tokens: float, **changes: object) -> pb.StatusResponse:
    counters = {
        "baton_generated_tokens_total": tokens,
        'baton_requests_total{outcome="length",class="default"}': tokens / 10,
        'baton_requests_total{outcome="cancelled",class="default"}': tokens / 20,
        'baton_handoffs_total{outcome="committed",transport="shm"}': tokens / 10,
        'baton_handoffs_total{outcome="stale",transport="shm"}': 7,
        'baton_handoff_bytes_total{transport="shm"}': tokens * 1e6,
    }
    latency = pb.Latency(
        window_seconds=60, requests=4, ttft_p50=0.1, ttft_p90=0.2, tpot_p50=0.01, tpot_p90=0.02
    )
    nodes = [node("draining", 3, 4)]
    return pb.StatusResponse(
        ready=True,
        model="m",
        clock_seconds=seconds,
        counters=counters,
        latency=latency,
        nodes=nodes,
    )


def test_rates_are_differences() -> None:
    speed = compute_rates(status(10.0, 100), status(12.0, 300))
    assert (speed.tokens, speed.requests, speed.failed) == pytest.approx((100.0, 15.0, 5.0))
    assert (speed.handoffs, speed.handoff_bytes) == pytest.approx((10.0, 100e6))
    assert sum_counter(status(0, 100).counters, "baton_handoffs_total") == 17
    for before in (None, status(99.0, 0)):  # the first look; a coordinator that has restarted
        assert compute_rates(before, status(12.0, 300)).tokens == 0
    assert compute_rates(status(10.0, 300), status(12.0, 100)).tokens == 0


def test_top_once_without_a_terminal(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.watch_responses = [status(10.0, 100), status(12.0, 300), status(14.0, 500)]
    assert run("top", "--once", "--interval", "0.5", "--endpoint", coordinator.endpoint) == 0
    out = plain(capsys.readouterr().out)
    assert coordinator.requests == [pb.WatchRequest(interval_seconds=0.5)]
    for expected in (
        "100.0 tokens/s",
        "TTFT p50 100.0 p90 200.0 ms",
        "d0 decode draining 3",
        "4+0+0 of 8",
    ):
        assert expected in out


def pool_status(seconds: float, lookups: float) -> pb.StatusResponse:
    """Three of four look-ups hit; each takes a millisecond."""
    found = status(seconds, 100)
    asking = {
        'baton_pool_lookups_total{result="hit"}': lookups * 0.75,
        'baton_pool_lookups_total{result="miss"}': lookups * 0.25,
        "baton_pool_lookup_seconds_total": lookups * 1e-3,
        "baton_pool_published_blocks_total": lookups * 2,
        "baton_pool_publications_total": lookups,
        "baton_pool_publish_lag_seconds_total": lookups * 0.005,
    }
    own = {
        'baton_pool_evictions_total{tier="memory"}': lookups / 2,
        "baton_pool_pins": 3,
        "baton_pool_bytes": 5e6,
    }
    stats = pb.NodeStats(
        blocks_total=100, blocks_free=50, blocks_cached=30, blocks_in_use=20, counters=own
    )
    found.nodes.add(
        name="d1", role="decode", service="in", incarnation="1", stats=pb.NodeStats(counters=asking)
    )
    found.nodes.add(name="pool-0", role="pool", service="in", incarnation="2", stats=stats)
    return found


def test_top_has_a_line_of_the_pool(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.watch_responses = [pool_status(10.0, 100), pool_status(12.0, 140)]
    assert run("top", "--once", "--endpoint", coordinator.endpoint) == 0
    out = plain(capsys.readouterr().out)
    for expected in (
        "20.00 look-ups/s, 75% hits, 1.00 ms each",
        "40.0 blocks/s published, 5.0 ms each",
        "10.0/s evicted",
        "holds 50 of 100 blocks, 5.0 MB 3 pins on 20 blocks",
        "pool-0 pool in service",
    ):
        assert expected in out, out


def test_a_node_that_has_restarted_counts_from_nothing() -> None:
    before, now = pool_status(10.0, 100), pool_status(12.0, 40)
    assert compute_rates(before, now).pool.lookups == 0
    before.nodes[1].incarnation = "9"
    assert compute_rates(before, pool_status(12.0, 140)).pool.lookups == 0


def test_top_json_is_an_object_a_line(
    coordinator: FakeCoordinatorServer, run: Run, capsys: Capture
) -> None:
    coordinator.watch_responses = [status(10.0, 100), status(12.0, 300)]
    assert (
        run("top", "--json", "--endpoint", coordinator.endpoint) == 3
    )  # the watch ended: nobody is there any more
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["rates"]["tokens"] for line in lines] == [0.0, 100.0]
    assert lines[0]["nodes"][0]["service"] == "draining"
