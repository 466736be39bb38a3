"""Recorded workloads: what is read, what is refused, and that prompts share exactly what the trace
says."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.__main__ import make_parser
from benchmarks.load.request_plan import PlannedRequest, make_text_prompt, make_token_prompt
from benchmarks.load.traces import (
    TraceReplay,
    TraceRequest,
    plan_from_trace,
    read_trace,
    repeated_prefix_share,
)
from benchmarks.serve import plan_cells, print_trace

MOONCAKE = [
    {"timestamp": 2000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 7, 8]},
    {"timestamp": 500, "input_length": 1024, "output_length": 40, "hash_ids": [0, 7]},
    {"timestamp": 3000, "input_length": 600, "output_length": 0, "hash_ids": [0, 9]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8

2023-11-16 18:17:04.4799600,110,27
"""


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)) + "\n")
    return path


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


def test_mooncake_is_read_in_order_of_time(mooncake: Path) -> None:
    trace = read_trace(mooncake)
    assert [one.arrival_seconds for one in trace] == [0.5, 2.0, 3.0]
    assert trace[1] == TraceRequest(2.0, 1030, 5, (0, 7, 8))
    assert trace[2].output_tokens == 1  # the least that can be asked for
    assert len(read_trace(mooncake, limit=2)) == 2


def test_azure_is_read(azure: Path) -> None:
    trace = read_trace(azure)
    assert [request.prompt_tokens for request in trace] == [4808, 3180, 110]
    assert [request.output_tokens for request in trace] == [10, 8, 27]
    assert {request.block_ids for request in trace} == {()}
    assert trace[2].arrival_seconds - trace[0].arrival_seconds == pytest.approx(0.5)
    plan = plan_from_trace(trace, "s")
    prompts = [tuple(make_token_prompt(request, 1000)) for request in plan]
    assert [len(prompt) for prompt in prompts] == [4808, 3180, 110]
    assert len({prompt[:16] for prompt in prompts}) == 3


def test_speed_and_scale(mooncake: Path) -> None:
    plan = plan_from_trace(read_trace(mooncake), "s", speed=2.0, scale=0.125)
    assert [one.start_seconds for one in plan] == [0.0, 0.75, 1.25]
    assert [(one.prompt_tokens, one.output_tokens) for one in plan] == [(128, 5), (129, 1), (75, 1)]
    assert [len(make_token_prompt(one, 1000)) for one in plan] == [128, 129, 75]


def common(first: list[int], other: list[int]) -> int:
    return len(
        list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, other, strict=False)))
    )


BLOCKS = st.lists(st.integers(0, 30), min_size=1, max_size=4)


@given(
    st.lists(st.tuples(BLOCKS, st.integers(1, 512)), min_size=2, max_size=5),
    st.sampled_from([20, 300, 1000]),
)
def test_prompts_share_what_the_ids_share_and_nothing_else(
    lines: list[tuple[list[int], int]], vocabulary: int
) -> None:
    trace = [TraceRequest(0.0, 512 * (len(ids) - 1) + last, 1, tuple(ids)) for ids, last in lines]
    prompts = [make_token_prompt(one, vocabulary) for one in plan_from_trace(trace, "s")]
    for (one, mine), (other, theirs) in itertools.combinations(zip(trace, prompts, strict=True), 2):
        assert len(mine) == one.prompt_tokens
        blocks = common(list(one.block_ids), list(other.block_ids))
        expected = min(512 * blocks, len(mine), len(theirs))
        assert (
            expected <= common(mine, theirs) <= expected + 8
        )  # ids that differ do so in their first digits


def test_another_run_has_other_prompts_and_the_same_seed_the_same(mooncake: Path) -> None:
    trace = read_trace(mooncake)
    first, same, other = (
        make_token_prompt(plan_from_trace(trace, seed)[0], 1000) for seed in ("a", "a", "b")
    )
    assert first == same
    assert common(first, other) < 16
    texts = [make_text_prompt(planned) for planned in plan_from_trace(trace, "a")]
    assert texts[0].split()[:1024] == texts[1].split()[:1024]
    assert texts[0].split()[512:] != texts[2].split()[512:]


def test_what_a_cache_can_save(mooncake: Path) -> None:
    plan = plan_from_trace(read_trace(mooncake), "s")
    assert repeated_prefix_share(plan) == pytest.approx((1024 + 512) / (1024 + 1030 + 600))
    assert repeated_prefix_share([PlannedRequest(0.0, 5, 1, seed=1)]) == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a trace"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        ("a,b,c\n1,2,3\n", "is not a trace"),
        ('{"timestamp": 1}\n', "line 1: .*input_length"),
        (
            '{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n',
            "line 1: 1 hash_ids, not 2",
        ),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [-1]}\n',
            "line 1: a hash id below 0",
        ),
        (
            '{"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n',
            "line 1: a value below 0",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n", "line 2: .*now"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,0,1\n",
            "line 2: a length below 1",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5\n", "line 2"),
        ("{" + "x" * (1 << 20), "a line is longer"),
    ],
)
def test_what_is_no_trace_is_told_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(path)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.* cannot be read: No such file"):
        read_trace(tmp_path / "nowhere")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_trace(binary)


@pytest.mark.parametrize(("speed", "scale"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_impossible_scales(mooncake: Path, speed: float, scale: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        plan_from_trace(read_trace(mooncake), "s", speed, scale)


def test_a_block_too_short_for_its_id() -> None:
    trace = [TraceRequest(0.0, 512, 1, (10**6,))]
    [request] = plan_from_trace(trace, "s", scale=0.002)
    with pytest.raises(ValueError, match="scale lengths less"):
        make_token_prompt(request, 1000)


def test_the_command_line_makes_one_cell_of_a_trace(mooncake: Path) -> None:
    import benchmarks.serve as serve

    def options(*words: str) -> object:
        return make_parser({"serve": serve}).parse_args(["serve", *words])

    words = ("--trace", str(mooncake), "--speed", "4", "--limit", "2", "--scale-lengths", "0.5")
    [cell] = plan_cells(options(*words), "s")  # type: ignore[arg-type]
    assert (cell.load, str(cell.load)) == (TraceReplay("mooncake", 4.0), "mooncake@4")
    assert [request.prompt_tokens for request in cell.plan] == [512, 515]
    console = Console(record=True, width=200)
    print_trace(console, cell)
    assert (
        "trace: 2 requests in 0.4 s, 1027 prompt tokens (50% in blocks sent before)"
        in console.export_text()
    )
    with pytest.raises(ValueError, match="exclude each other"):
        plan_cells(options(*words, "--sweep", "1,2"), "s")  # type: ignore[arg-type]
    cells = plan_cells(options("--sweep", "1,32", "--requests", "8"), "s")  # type: ignore[arg-type]
    assert [(str(cell.load), len(cell.plan)) for cell in cells] == [("c1", 8), ("c32", 128)]
