"""The paced engine keeps time by its costs, agrees with its reference, and notices KV that is not
as it should be."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.kv.blocks import KVLayout
from baton.process.clock import FakeClock
from baton.types import BlockIndex, FinishReason, SamplingParams
from node_engine.core.sequences.outcomes import TokenEmitted
from node_engine.core.step.engine import Engine
from node_engine.core.step.step_batch import (
    PromptLogprobsSpec,
    SampleSpec,
    SequenceId,
    SequenceSlice,
    SliceResult,
    StepBatch,
)
from node_engine.paced.costs import ZERO_COSTS, PacedCosts
from node_engine.paced.paced_engine import PACED_LAYOUT, PacedEngine
from tests.layer_callbacks import FunctionCallback
from tests.paced_reference import paced_reference_logprobs, paced_reference_tokens
from tests.unit.node_engine.core.stepped_node import VOCAB, SteppedNode, expected_tokens, make_work
from tests.unit.node_engine.paced.paced_bench import PROMPT, SIZE, PacedBench


def test_paced_engine_is_an_engine() -> None:
    engine: Engine = PacedEngine()
    assert engine.layout == PACED_LAYOUT
    assert len(engine.model_digest) == 32
    assert engine.model_digest != PacedEngine(vocab_size=7).model_digest


@given(length=st.integers(1, 100), cuts=st.lists(st.integers(1, 99), max_size=4, unique=True))
def test_chunks_do_not_matter(length: int, cuts: list[int]) -> None:
    bench = PacedBench()
    edges = [0, *sorted(cut for cut in cuts if cut < length), length]
    for start, end in pairwise(edges):
        token = bench.run(PROMPT[start:end], start)
    assert [token] == paced_reference_tokens(PROMPT[:length], 1, VOCAB)


def test_reference_can_be_continued() -> None:
    tokens = paced_reference_tokens(PROMPT[:10], 20, VOCAB)
    assert tokens[7:] == paced_reference_tokens([*PROMPT[:10], *tokens[:7]], 13, VOCAB)
    assert len(set(tokens)) > 10
    assert all(0 < token < VOCAB for token in tokens), "id 0 is EOS and never comes by itself"


@pytest.mark.parametrize("changed", [0, 5, 9])
def test_every_token_of_the_context_counts(changed: int) -> None:
    prompt = PROMPT[:10]
    prompt[changed] += 1
    assert paced_reference_tokens(prompt, 1, VOCAB) != paced_reference_tokens(PROMPT[:10], 1, VOCAB)
    swapped = [PROMPT[1], PROMPT[0], *PROMPT[2:10]]
    assert paced_reference_tokens(swapped, 1, VOCAB) != paced_reference_tokens(
        PROMPT[:10], 1, VOCAB
    )


# KV that is not as it should be


@settings(max_examples=200)
@given(data=st.data())
def test_one_flipped_bit_is_noticed(data: st.DataObject) -> None:
    """Anywhere in the KV of a context of 40 tokens, when another sequence id reads it: after a
    hand-off."""
    bench = PacedBench()
    bench.run(PROMPT[:40], 0)
    token = data.draw(st.integers(0, 39))
    layer = data.draw(st.integers(0, PACED_LAYOUT.num_layers - 1))
    side = data.draw(st.integers(0, 1))
    byte = data.draw(st.integers(0, PACED_LAYOUT.head_dim * 4 - 1))
    slab = PACED_LAYOUT.slab_offset(token // SIZE * PACED_LAYOUT.block_bytes, layer)
    offset = (
        slab + side * PACED_LAYOUT.slab_bytes // 2 + token % SIZE * PACED_LAYOUT.head_dim * 4 + byte
    )
    bench.arena[offset] ^= 1 << data.draw(st.integers(0, 7))
    wrong = [bench.run([7], 40, sequence=1)]
    for position in range(41, 44):  # one of a thousand tokens may be right by chance, not four
        wrong.append(bench.run([wrong[-1]], position, sequence=1))
    assert wrong != paced_reference_tokens([*PROMPT[:40], 7], 4, VOCAB)


def damage(bench: PacedBench, kind: str) -> None:
    block, slab = PACED_LAYOUT.block_bytes, PACED_LAYOUT.slab_bytes
    arena = bench.arena
    if kind == "a layer never written":
        arena[block + slab : block + 2 * slab] = bytes(slab)
    elif kind == "a block never written":
        arena[0:block] = bytes(block)
    elif kind == "two blocks swapped":
        arena[0 : 2 * block] = arena[block : 2 * block] + arena[0:block]
    elif kind == "two layers swapped":
        arena[0 : 2 * slab] = arena[slab : 2 * slab] + arena[0:slab]
    elif kind == "K and V swapped":
        arena[0:slab] = arena[slab // 2 : slab] + arena[0 : slab // 2]
    elif kind == "a block of another prompt":
        bench.run(PROMPT[50:82], 0, sequence=9, table=[BlockIndex(4), BlockIndex(5)])
        arena[block : 2 * block] = arena[5 * block : 6 * block]
    elif kind == "one layer of another prompt":
        bench.run(PROMPT[50:82], 0, sequence=9, table=[BlockIndex(4), BlockIndex(5)])
        arena[block : block + slab] = arena[5 * block : 5 * block + slab]
    elif kind == "the same tokens after another prefix":
        bench.run(
            PROMPT[50:66] + PROMPT[16:32], 0, sequence=9, table=[BlockIndex(4), BlockIndex(5)]
        )
        arena[block : 2 * block] = arena[5 * block : 6 * block]
    else:
        raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "a layer never written",
        "a block never written",
        "two blocks swapped",
        "two layers swapped",
        "K and V swapped",
        "a block of another prompt",
        "one layer of another prompt",
        "the same tokens after another prefix",
    ],
)
def test_wrong_kv_gives_wrong_tokens(kind: str) -> None:
    bench = PacedBench()
    right = bench.run(PROMPT[:40], 0)
    assert (
        bench.run([right], 40, sequence=1)
        == paced_reference_tokens([*PROMPT[:40], right], 1, VOCAB)[0]
    )
    damage(bench, kind)
    wrong = [bench.run([right], 40, sequence=2)]
    for position in range(41, 44):
        wrong.append(bench.run([wrong[-1]], position, sequence=2))
    assert wrong != paced_reference_tokens([*PROMPT[:40], right], 4, VOCAB)


def test_the_last_block_is_read_in_every_step() -> None:
    bench = PacedBench()
    right = bench.run(PROMPT[:40], 0)
    bench.arena[2 * PACED_LAYOUT.block_bytes + PACED_LAYOUT.slab_bytes] ^= 1
    wrong = [bench.run([right], 40)]
    for position in range(41, 44):
        wrong.append(bench.run([wrong[-1]], position))
    assert wrong != paced_reference_tokens([*PROMPT[:40], right], 4, VOCAB)


@pytest.mark.parametrize("reread", [False, True])
def test_reread_finds_a_late_write(reread: bool) -> None:
    bench = PacedBench(reread=reread)
    right = paced_reference_tokens(PROMPT[:40], 20, VOCAB)
    answer = [bench.run(PROMPT[:40], 0)]
    bench.arena[3] ^= 1
    for position in range(40, 59):
        answer.append(bench.run([answer[-1]], position))
    assert answer[:8] == right[:8]
    assert (answer == right) is not reread


def test_a_sequence_that_starts_over_reads_everything_again() -> None:
    bench = PacedBench()
    bench.run(PROMPT[:40], 0)
    bench.arena[3] ^= 1
    wrong = [bench.run(PROMPT[32:40], 32)]
    for position in range(40, 43):
        wrong.append(bench.run([wrong[-1]], position))
    assert wrong != paced_reference_tokens(PROMPT[:40], 4, VOCAB)


def test_many_sequences_in_one_step_do_not_mix() -> None:
    engine = PacedEngine(ZERO_COSTS, vocab_size=VOCAB)
    engine.bind_cache(memoryview(bytearray(64 * PACED_LAYOUT.block_bytes)), 64)
    bench = PacedBench(1)
    prompts = [PROMPT[number : number + 5 + 9 * number] for number in range(6)]
    tables = [[BlockIndex(10 * number + block) for block in range(4)] for number in range(6)]
    slices = [
        bench.slice(prompt, 0, number, tables[number]) for number, prompt in enumerate(prompts)
    ]
    outputs = [[made.token_id] for made in engine.run(StepBatch(tuple(slices)))]
    for _ in range(5):
        slices = [
            bench.slice([output[-1] or 0], len(prompt) + len(output) - 1, number, tables[number])
            for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]
        for output, made in zip(outputs, engine.run(StepBatch(tuple(slices))), strict=True):
            output.append(made.token_id)
    assert outputs == [paced_reference_tokens(prompt, 6, VOCAB) for prompt in prompts]


# scores


@pytest.mark.parametrize("damaged", [False, True])
def test_scores_are_the_references_unless_the_kv_is_wrong(damaged: bool) -> None:
    bench = PacedBench()
    bench.run(PROMPT[:40], 0)
    if damaged:
        bench.arena[5] ^= 1
    params = SamplingParams(9, logprobs=3, prompt_logprobs=3)
    slice_ = SequenceSlice(
        SequenceId(1),
        tuple(PROMPT[40:50]),
        40,
        bench.table,
        SampleSpec(params, 0, 50),
        PromptLogprobsSpec(tuple(PROMPT[41:50]), 3),
    )
    [made] = bench.engine.run(StepBatch((slice_,)))
    token = paced_reference_tokens(PROMPT[:50], 1, VOCAB)[0]
    wanted = paced_reference_logprobs([*PROMPT[:50], token], 3, VOCAB)[40:]
    assert (made.prompt_logprobs == tuple(wanted[:-1])) != damaged
    assert (made == SliceResult(token, wanted[-1], tuple(wanted[:-1]))) != damaged


def test_scores_are_in_order_and_survive_float32() -> None:
    for score in paced_reference_logprobs(PROMPT, 20, 250_000):
        logprobs = [score.logprob, *(logprob for _, logprob in score.top_logprobs)]
        assert all(logprob < 0 and np.float32(logprob) == logprob for logprob in logprobs)
        assert logprobs[1:] == sorted(logprobs[1:], reverse=True)
        assert len({token for token, _ in score.top_logprobs}) == 20
    drawn = paced_reference_tokens(PROMPT, 1, VOCAB)
    last = paced_reference_logprobs([*PROMPT, *drawn], 1, VOCAB)[-1]
    assert last.top_logprobs == ((drawn[0], last.logprob),), "what is drawn is the most likely"


# pace


def test_time_is_spread_over_the_layers() -> None:
    clock = FakeClock()
    costs = PacedCosts(
        step_base_us=100.0,
        prefill_us_per_token=10.0,
        prefill_us_per_cached_token=1.0,
        decode_base_us=1000.0,
        decode_us_per_sequence=50.0,
        decode_us_per_context_token=2.0,
    )
    engine = PacedEngine(costs, vocab_size=VOCAB, clock=clock, wait=clock.advance)
    engine.bind_cache(memoryview(bytearray(16 * PACED_LAYOUT.block_bytes)), 16)
    bench = PacedBench(16)
    layers: list[tuple[int, float]] = []
    chunk = SequenceSlice(SequenceId(0), tuple(PROMPT[:32]), 0, bench.table, None)
    assert engine.run(
        StepBatch((chunk,)), FunctionCallback(lambda layer: layers.append((layer, clock.now)))
    ) == (SliceResult(),)
    total = 100e-6 + 32 * 10e-6
    assert [layer for layer, _ in layers] == [0, 1, 2, 3]
    assert [now for _, now in layers] == pytest.approx(
        [total * (layer + 1) / 4 for layer in range(4)]
    )
    rest = bench.slice(PROMPT[32:40], 32)
    assert costs.compute_step_seconds(StepBatch((rest,))) == pytest.approx(
        100e-6 + 8 * 10e-6 + 32 * 1e-6
    )
    two = (bench.slice([1], 40), bench.slice([1], 60, 1))
    assert costs.compute_step_seconds(StepBatch(two)) == pytest.approx(
        100e-6 + 1000e-6 + 2 * 50e-6 + 100 * 2e-6
    )


def test_own_step_time_is_subtracted_from_the_wait() -> None:
    clock, waits = FakeClock(), list[float]()
    engine = PacedEngine(
        PacedCosts(4e6, 0, 0, 0, 0, 0), clock=clock, wait=waits.append
    )  # the clock stands still
    engine.bind_cache(memoryview(bytearray(PACED_LAYOUT.block_bytes)), 1)
    engine.run(
        StepBatch((SequenceSlice(SequenceId(0), (1,), 0, [BlockIndex(0)], None),)),
        FunctionCallback(lambda layer: clock.advance(1.5)),
    )
    assert waits == [1.0, 0.5], "the calls back took the time of the last two layers"


def test_kv_of_a_layer_is_there_when_it_is_announced() -> None:
    bench = PacedBench()
    slab = PACED_LAYOUT.slab_bytes
    written: list[list[bool]] = []

    def on_layer(layer: int) -> None:
        written.append([any(bench.arena[each * slab : (each + 1) * slab]) for each in range(4)])

    bench.engine.run(StepBatch((bench.slice(PROMPT[:16], 0),)), FunctionCallback(on_layer))
    assert written == [[number <= layer for number in range(4)] for layer in range(4)]


# the rest of the contract


def test_eos_comes_by_its_probability_and_never_where_forbidden() -> None:
    drawn = paced_reference_tokens(PROMPT[:10], 300, VOCAB, eos_token_ids=(3,), eos_probability=0.2)
    assert 30 <= drawn.count(3) <= 90
    assert paced_reference_tokens(PROMPT[:10], 300, VOCAB, eos_token_ids=(3,)).count(3) == 0
    bench = PacedBench(eos_token_ids=(3,), eos_probability=0.2)
    seen: list[int | None] = []
    for length in range(1, 60):
        sample = SampleSpec(SamplingParams(9), 0, length, forbidden_token_ids=(3, 5))
        slice_ = SequenceSlice(SequenceId(length), tuple(PROMPT[:length]), 0, bench.table, sample)
        seen += [made.token_id for made in bench.engine.run(StepBatch((slice_,)))]
    assert not {3, 5} & set(seen)


def test_a_node_stops_at_eos() -> None:
    node = SteppedNode(eos_probability=0.2)
    work = make_work("a", PROMPT[:10], 100)
    node.add_work(work)
    node.run()
    tokens = paced_reference_tokens(PROMPT[:10], 100, VOCAB, eos_probability=0.2)
    assert node.emitted_tokens(work) == tokens[: tokens.index(0) + 1]
    assert [each.event.finish_reason for each in node.outcomes if isinstance(each, TokenEmitted)][
        -1
    ] is FinishReason.STOP
    ignoring = make_work("b", PROMPT[:10], 100, ignore_eos=True)
    node.add_work(ignoring)
    node.run()
    assert node.emitted_tokens(ignoring) == tokens


def test_forbidding_almost_everything_ends() -> None:
    bench = PacedBench()
    engine = PacedEngine(ZERO_COSTS, vocab_size=4, eos_token_ids=(0,))
    engine.bind_cache(memoryview(bench.arena), 8)
    sample = SampleSpec(SamplingParams(9), 0, 1, forbidden_token_ids=(0, 1, 2))
    assert engine.run(StepBatch((SequenceSlice(SequenceId(0), (1,), 0, bench.table, sample),))) == (
        SliceResult(3),
    )


def test_other_layouts() -> None:
    wide = KVLayout(num_layers=2, num_kv_heads=3, head_dim=4, block_size=4, dtype="float32")
    bench = PacedBench(layout=wide, num_blocks=30)
    assert [bench.run(PROMPT[:100], 0)] == paced_reference_tokens(PROMPT[:100], 1, VOCAB)
    with pytest.raises(ConfigError, match="float32"):
        PacedEngine(layout=KVLayout(2, 1, 8, 16, "bfloat16"))


def test_expected_tokens_are_the_reference() -> None:
    assert expected_tokens(make_work("a", PROMPT[:4], 6)) == paced_reference_tokens(
        PROMPT[:4], 6, VOCAB
    )
