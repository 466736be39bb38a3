"""`bench engine`: a small slice of the run, its options, and what its figures say."""

import io
import statistics
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import engine
from benchmarks.__main__ import make_parser
from benchmarks.clusters.llama_folders import LLAMA_TINY, write_llama_folder
from benchmarks.cpu.engine_worker import DecodeCase, EngineCase, EngineVariant, PrefillCase
from benchmarks.cpu.rates import CpuRates, RateSizes, allocate_huge_page_buffer
from benchmarks.cpu.shapes import SHAPES, open_model
from kv_kernels.native.sources import LIBRARY

BF16 = EngineVariant("native", "bfloat16", "none")
INT8 = EngineVariant("native", "bfloat16", "int8")
TORCH = EngineVariant("torch", "bfloat16", "none")
BUILD = Path("other.so")
STEP = DecodeCase(batch=4, context=160, steps=16)


def parse(*words: str) -> Namespace:
    return make_parser({"engine": engine}).parse_args(["engine", *words])


def test_every_step_stands_beside_the_least_possible_time(tmp_path: Path) -> None:
    folder = write_llama_folder(tmp_path / "model", LLAMA_TINY | {"torch_dtype": "bfloat16"})
    options = parse(
        *("--model", str(folder), "--cpu-kernels", "torch", "--threads", "1"),
        *("--batches", "1,2", "--context", "16", "--steps", "2", "--prompts", "32", "--rounds=1"),
    )
    sizes = RateSizes(read_bytes=4 << 20, product_tokens=(16,), square=64)
    rows = engine.main(options, Console(file=io.StringIO()), "some command", sizes)
    units = {row.name: row.unit for row in rows}
    assert units == {
        "engine/read": "GB/s",
        "engine/products_bf16": "GFLOP/s",
        "engine/products_int8": "GOP/s",
        "engine/products_fp32": "GFLOP/s",
        "engine/torch/bf16/decode_1": "ms",
        "engine/torch/bf16/decode_2": "ms",
        "engine/torch/bf16/prefill_32": "ms",
    }
    assert all(row.value > 0 for row in rows)
    for row in rows[4:]:
        assert row.limit
        assert row.share == pytest.approx(row.limit / row.value)


def test_the_least_time_is_of_bytes_or_of_operations() -> None:
    """The model `small` reads 774.5 MB in a decode step, and the KV of its sequences."""
    rates = CpuRates(70e9, {"bfloat16": 424e9, "int8": 720e9, "float32": 190e9})
    cases: list[EngineCase] = [DecodeCase(1, 160, 16), DecodeCase(16, 160, 16), PrefillCase(512)]
    rounds = engine.EngineRounds()
    for case in cases:
        rounds.samples[BF16, case].append(engine.StepSample(0.1, rates))
    with open_model("small") as model:
        rows = engine._step_rows(rounds, model, [BF16], cases, "command")
    at_one, at_sixteen, prefill = [row.limit for row in rows]
    assert at_one == pytest.approx(774.5 / 70, rel=0.01)
    assert at_sixteen == pytest.approx(16 * 774.2 / 424, rel=0.03)
    assert prefill == pytest.approx(512 * 715.8 / 424, rel=0.05)


def test_products_of_bf16_and_int8_are_bounded_by_fp32_where_it_is_faster() -> None:
    rates = CpuRates(26e9, {"bfloat16": 169e9, "int8": 1330e9, "float32": 329e9})
    assert rates.of_steps("bfloat16").products == 329e9
    assert rates.of_steps("float32").products == 329e9
    assert rates.of_steps("int8").products == 1330e9
    without_vnni = CpuRates(16e9, {"int8": 5e9, "float32": 121e9})
    assert without_vnni.of_steps("int8").products == 121e9


def sample_steps(*seconds: float, read_rate: float = 1e9) -> list[engine.StepSample]:
    rates = CpuRates(read_rate, {"bfloat16": 1e15, "float32": 1e15})
    return [engine.StepSample(one, rates) for one in seconds]


def test_steps_are_compared_with_what_memory_gave_at_their_time() -> None:
    """Memory that others use slows down reads and steps alike: the share does not change."""
    rounds = engine.EngineRounds()
    samples = rounds.samples[BF16, STEP]
    for slowdown in (1, 3, 2):
        samples += sample_steps(0.02 * slowdown, read_rate=60e9 / slowdown)
    with open_model("small") as model:
        (row,) = engine._step_rows(rounds, model, [BF16], [STEP], "command")
        least = model.bounds.bound_decode(
            4, 160, CpuRates(60e9, {"int8": 1e15, "float32": 1e12}).of_steps("int8")
        )
    assert row.value == pytest.approx(40.0)
    assert row.share == pytest.approx(least / 0.02)


def test_variants_are_compared_sample_by_sample() -> None:
    """Other load slows down both at one time: the ratio does not change."""
    rounds = engine.EngineRounds()
    rounds.samples[BF16, STEP] += sample_steps(0.02, 0.2, 0.03)
    rounds.samples[INT8, STEP] += sample_steps(0.01, 0.1, 0.01)
    rounds.samples[TORCH, STEP] += sample_steps(0.06, 0.6, 0.06)
    rows = engine._ratio_rows(rounds, [BF16, INT8, TORCH], [STEP], "command")
    assert {row.name: row.value for row in rows} == {
        "engine/native/bf16/decode_4_of_torch": pytest.approx(3.0),
        "engine/native/int8/decode_4_of_bf16": pytest.approx(2.0),
    }


def test_builds_are_compared_variant_by_variant() -> None:
    rounds = engine.EngineRounds()
    before, before_int8 = (replace(variant, other_build=BUILD) for variant in (BF16, INT8))
    rounds.samples[BF16, STEP] += sample_steps(0.02, 0.2)
    rounds.samples[before, STEP] += sample_steps(0.03, 0.3)
    rounds.samples[INT8, STEP] += sample_steps(0.01, 0.1)
    rounds.samples[before_int8, STEP] += sample_steps(0.008, 0.08)
    rows = engine._ratio_rows(rounds, [BF16, INT8, before, before_int8], [STEP], "command")
    assert {row.name: row.value for row in rows} == {
        "engine/native/bf16/decode_4_of_before": pytest.approx(1.5),
        "engine/native/int8/decode_4_of_bf16": pytest.approx(2.0),
        "engine/native/int8/decode_4_of_before": pytest.approx(0.8),
    }


# Without a C++ compiler there is no build to copy, and torch computes.
@pytest.mark.skipif(not LIBRARY.exists(), reason="the native kernels are not built")
def test_another_build_is_an_engine_for_each_quantization(tmp_path: Path) -> None:
    other = tmp_path / "other.so"
    other.write_bytes(LIBRARY.read_bytes())
    with open_model("tiny") as model:
        variants = engine.plan_variants(model, "native,torch", "none,int8", other)
    assert [variant.name for variant in variants if variant.other_build == other] == [
        "native_before/bf16_compact",
        "native_before/bf16",
        "native_before/int8",
    ]
    assert not any(variant.other_build for variant in variants if variant.kernels == "torch")


def test_what_is_no_build_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "other.so").write_text("no library")
    with (
        open_model("tiny") as model,
        pytest.raises(ValueError, match=r"other\.so cannot be loaded"),
    ):
        engine.plan_variants(model, "", "none", tmp_path / "other.so")


def test_read_buffer_is_private_memory() -> None:
    """Linux rarely backs shared memory with huge pages, and small pages are read more slowly."""
    memory = allocate_huge_page_buffer(4 << 20)
    lines = Path("/proc/self/maps").read_text().splitlines()
    for line in lines:
        span, permissions = line.split()[:2]
        start, end = (int(address, 16) for address in span.split("-"))
        if start <= memory.data_ptr() < end:
            assert permissions == "rw-p"
            return
    pytest.fail("the memory is not mapped")


def test_rates_are_medians_of_the_samples() -> None:
    rates = [CpuRates(read, {"int8": read * 2}) for read in (3.0, 1.0, 2.0)]
    rounds = engine.EngineRounds()
    rounds.samples[BF16, STEP] += [engine.StepSample(0.1, one) for one in rates]
    found = rounds.median_rates()
    assert (found.read_bytes, found.products["int8"]) == (2.0, statistics.median((6.0, 2.0, 4.0)))


def test_named_shapes_have_the_parameters_of_their_description() -> None:
    for name, layers, table in (("tiny", 17.3e6, 3.1e6), ("small", 357.8e6, 29.4e6)):
        with open_model(name) as model:
            resident = model.bounds.resident_bytes / 2
        tables = 1 if SHAPES[name]["tie_word_embeddings"] else 2
        assert resident == pytest.approx(layers + tables * table, rel=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batches", "0"), "--batches"),
        (("--batches", "", "--prompts", ""), "--batches"),
        (("--rounds", "0"), "--rounds"),
        (("--threads", "-1"), "--threads"),
        (("--cpu-kernels", "fast"), "--cpu-kernels fast: this CPU has"),
        (("--quantize", "int3"), "--quantize 'int3': there are none"),
        (("--before", "nowhere.so"), "--before nowhere.so: there is no such file"),
        (("--model", "nowhere"), "neither a folder with a config.json nor tiny, small"),
    ],
)
def test_malformed_options_are_rejected(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.main(parse(*words), Console(file=io.StringIO()), "command")
