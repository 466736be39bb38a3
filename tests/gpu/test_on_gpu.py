"""The kernels and the engine on an NVIDIA GPU, against their twins on CPUs; skipped without one."""

import gc
import mmap
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError
from baton.shared_memory.segment import DEFAULT_SEGMENT_FOLDER
from baton.types import BlockIndex, SamplingParams
from kv_kernels.reference.host_memory import memory_as_cuda_tensor
from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch
from node_engine.model.common.base_engine import BaseEngine
from node_engine.model.model_loader import load_model_engine
from node_engine.probe import probe_libraries
from tests.models import FamilyName, build_model, find_stable_prompts
from tests.pool.model_node import check_reads

pytest.importorskip("triton")

from triton import knobs

from node_engine.model.gpu.decode_graphs import DecodeGraphs
from node_engine.model.gpu.draws import StepOutput
from node_engine.model.gpu.fused_transformer import choose_splits
from node_engine.model.gpu.step_inputs import StepInputs
from tests.gpu import block_comparisons, engine_comparisons
from tests.gpu import kernel_comparisons as compare
from tests.gpu.kernel_comparisons import SAMPLING_FILTERS, AttentionShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]
CUDA = torch.device("cuda")
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
LLAMA_8B = AttentionShape(8, 4, 128, 16)
DECODE_CASES: dict[str, tuple[AttentionShape, tuple[int, ...]]] = {
    "grouped": (AttentionShape(2, 7, 64, 16), (5, 1024, 1, 777)),
    "several splits": (LLAMA_8B, (4099, 2, 33)),
    "one sequence": (LLAMA_8B, (9000,)),
    "padding": (LLAMA_8B, (700, 0, 33, 0)),
    "odd sizes": (AttentionShape(1, 1, 24, 6), (11,)),
    "windowed": (AttentionShape(8, 4, 128, 16, window=517), (4099, 600, 517, 516, 33)),
}
PREFILL_CASES: dict[str, tuple[AttentionShape, tuple[tuple[int, int], ...]]] = {
    "one chunk": (LLAMA_8B, ((0, 1024),)),
    "behind a prefix": (LLAMA_8B, ((1536, 512),)),
    "several chunks": (LLAMA_8B, ((0, 5), (9, 130), (2000, 1), (300, 257))),
    "ungrouped": (AttentionShape(2, 1, 64, 16), ((0, 300), (236, 64), (299, 1))),
    "odd sizes": (AttentionShape(1, 3, 24, 6), ((0, 70), (77, 200))),
    "windowed": (AttentionShape(2, 4, 64, 16, window=517), ((0, 700), (1500, 400), (4000, 3))),
    "short window": (AttentionShape(2, 4, 64, 16, window=22), ((0, 150), (300, 140))),
}
MANY_BLOCKS = 36_000  # of 64 Ki elements: more than 2^31 elements


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("case", DECODE_CASES)
def test_paged_decode_equals_the_cpu_reference(case: str, kind: str) -> None:
    shape, lengths = DECODE_CASES[case]
    for splits in (1, 3, choose_splits(len(lengths), shape.kv_heads)):
        error = compare.measure_decode_error(shape, lengths, splits, getattr(torch, kind), CUDA)
        assert error < TOLERANCE[kind], splits


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("case", PREFILL_CASES)
def test_chunked_prefill_equals_the_cpu_reference(case: str, kind: str) -> None:
    shape, chunks = PREFILL_CASES[case]
    error = compare.measure_prefill_error(shape, chunks, getattr(torch, kind), CUDA)
    assert error < TOLERANCE[kind]


@pytest.mark.parametrize("window", [None, 22])
@pytest.mark.parametrize("kind", TOLERANCE)
def test_prefill_chunk_may_start_at_any_offset(kind: str, window: int | None) -> None:
    shape = AttentionShape(2, 2, 32, 16, window)
    for start in range(20):
        counts = (1, 16 - start % 16, 32 - start % 16, 61)
        error = compare.measure_prefill_error(
            shape, [(start, count) for count in counts], getattr(torch, kind), CUDA
        )
        assert error < TOLERANCE[kind], start


def test_attention_reads_blocks_beyond_two_billion_elements() -> None:
    decode = compare.measure_decode_error(
        LLAMA_8B, (700, 33), 3, torch.bfloat16, CUDA, first_block=MANY_BLOCKS
    )
    prefill = compare.measure_prefill_error(
        LLAMA_8B, ((0, 130), (300, 70)), torch.bfloat16, CUDA, first_block=MANY_BLOCKS
    )
    assert decode < TOLERANCE["bfloat16"]
    assert prefill < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    "shape",
    [LLAMA_8B, AttentionShape(2, 7, 64, 16), AttentionShape(1, 3, 24, 6)],
    ids=["8B", "grouped by 7", "odd sizes"],
)
def test_rotated_queries_and_written_kv_equal_the_cpu_reference(
    shape: AttentionShape, qk_norm: bool, kind: str
) -> None:
    error = compare.measure_rotation_error(shape, 50, getattr(torch, kind), CUDA, qk_norm=qk_norm)
    assert error < TOLERANCE[kind]


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize(("tokens", "width"), [(1, 4096), (300, 4096), (7, 896), (3, 37)])
def test_norm_and_gate_equal_the_cpu_reference(tokens: int, width: int, kind: str) -> None:
    dtype = getattr(torch, kind)
    for residual in (False, True):
        error = compare.measure_norm_error(tokens, width, dtype, CUDA, residual=residual)
        assert error < TOLERANCE[kind]
    assert compare.measure_silu_error(tokens, 3 * width, dtype, CUDA) < TOLERANCE[kind]


@pytest.mark.parametrize(
    ("features", "width", "bias"), [(6144, 4096, True), (4096, 14336, False), (2000, 3000, True)]
)
@pytest.mark.parametrize("kind", TOLERANCE)
def test_product_of_one_row(kind: str, features: int, width: int, bias: bool) -> None:
    error = compare.measure_row_product_error(
        features, width, getattr(torch, kind), CUDA, bias=bias
    )
    assert error < TOLERANCE[kind]


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("name", SAMPLING_FILTERS)
def test_draws_equal_those_on_the_cpu(name: str, kind: str) -> None:
    for vocab, rows in ((1000, 64), (128_256, 24)):
        assert not compare.count_different_draws(
            SAMPLING_FILTERS[name], vocab, rows, getattr(torch, kind), CUDA
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_maximum_are_reported(temperature: float) -> None:
    intact, *damaged = compare.sample_damaged_rows(CUDA, temperature)
    assert intact >= 0
    assert damaged == [-1, -1, -1]


@pytest.mark.parametrize("layer", [None, 0, 3])
@pytest.mark.parametrize("kind", TOLERANCE)
def test_block_copies_between_gpu_and_host_change_nothing_else(
    kind: str, layer: int | None
) -> None:
    dtype = getattr(torch, kind)
    shape = (6, 4, 2, 8, 16, 128)
    device = torch.empty(shape, dtype=dtype, device=CUDA)
    memory = mmap.mmap(-1, device.nbytes)
    host = memory_as_cuda_tensor(memoryview(memory), dtype).view(shape)
    assert block_comparisons.check_block_copies(device, host, layer)
    assert block_comparisons.check_block_copies(host, device, layer)
    assert block_comparisons.check_moved_blocks(device, host, layer) == (True, True)
    assert block_comparisons.check_moved_blocks(host, device, layer) == (True, True)


def load_gpu_engine(folder: Path) -> BaseEngine:
    return load_model_engine(folder, dtype="float32", device="cuda")


def generate(engine: BaseEngine, prompt: Sequence[int], count: int, chunk: int) -> list[int]:
    """Greedy tokens: the prompt in chunks, then one token a step, in blocks in reverse order."""
    size = engine.layout.block_size
    table = [BlockIndex(block) for block in reversed(range(-(-(len(prompt) + count) // size)))]
    params = SamplingParams(max_tokens=count, temperature=0.0)
    tokens, start = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        end = min(len(tokens), start + chunk)
        spec = SampleSpec(params, 0, end) if end == len(tokens) else None
        (made,) = engine.run(
            StepBatch((SequenceSlice(SequenceId(0), tuple(tokens[start:end]), start, table, spec),))
        )
        start = end
        if made.token_id is not None:
            tokens.append(made.token_id)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "qwen3", "mixed", "linear"])
def test_gpu_tokens_equal_transformers(family: FamilyName, tmp_path: Path) -> None:
    folder = build_model(family, tmp_path)
    engine = load_gpu_engine(folder)
    engine_comparisons.bind_engine(engine)
    prompts = find_stable_prompts(folder, (1, 17, 130, 257), 24)
    wanted = [list(stable.reference_tokens) for stable in prompts]
    for stable in prompts:
        assert generate(engine, stable.prompt, 24, chunk=64) == list(stable.reference_tokens)
    together = engine_comparisons.generate_in_chunks(
        engine, [stable.prompt for stable in prompts], 24
    )
    assert together == wanted


@pytest.mark.parametrize("family", ["llama", "mixed"])
def test_decode_continues_from_announced_layers(family: FamilyName, tmp_path: Path) -> None:
    folder = build_model(family, tmp_path)
    for stable in find_stable_prompts(folder, (16, 130), 12):
        tokens = engine_comparisons.generate_after_handoff(
            load_gpu_engine(folder), load_gpu_engine(folder), stable.prompt, 12
        )
        assert tokens == list(stable.reference_tokens)


def test_saved_blocks_equal_announced_ones(tmp_path: Path) -> None:
    folder = build_model("qwen3", tmp_path)
    prompt = [place * 7 % 512 for place in range(75)]

    def load_engine() -> BaseEngine:
        # A step that runs ahead would write one position more.
        return load_model_engine(folder, dtype="float32", device="cuda", uses_graphs=False)

    assert engine_comparisons.saves_what_it_announces(load_engine, prompt)


@pytest.mark.parametrize("family", ["mixed", "qwen3"])
def test_special_rows_equal_those_of_the_cpu_engine(family: FamilyName, tmp_path: Path) -> None:
    folder = build_model(family, tmp_path)
    engines = load_gpu_engine(folder), load_model_engine(folder, dtype="float32", device="cpu")
    for engine in engines:
        engine_comparisons.bind_engine(engine)
    (tokens, logprobs), (wanted_tokens, wanted_logprobs) = map(
        engine_comparisons.run_special_rows, engines
    )
    assert tokens == wanted_tokens
    assert logprobs == pytest.approx(wanted_logprobs, abs=1e-3)


def test_copied_block_continues_the_prefix(tmp_path: Path) -> None:
    folder = build_model("llama", tmp_path)
    engine = load_gpu_engine(folder)
    engine_comparisons.bind_engine(engine)
    (stable,) = find_stable_prompts(folder, (16,), 12)
    tokens = engine_comparisons.generate_in_a_copied_block(engine, stable.prompt, 12)
    assert tokens == list(stable.reference_tokens)


def test_damaged_cache_is_reported(tmp_path: Path) -> None:
    engine = load_gpu_engine(build_model("llama", tmp_path))
    engine_comparisons.bind_engine(engine)
    assert engine_comparisons.reports_damaged_cache(engine)


def test_no_kernel_is_compiled_after_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the numbers of slices, tokens and draws of a step: compiling takes half a second."""
    folder = build_model("llama", tmp_path)
    engine = load_model_engine(folder, dtype="bfloat16", device="cuda", max_num_seqs=32)
    num_blocks = 512
    memory = mmap.mmap(-1, num_blocks * engine.layout.block_bytes)
    engine.bind_cache(memoryview(memory), num_blocks)
    engine.warm_up(700)
    compiled: list[str] = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **call: compiled.append(call["repr"])
    )
    random_ = random.Random(1)
    for step in range(60):
        lengths = [1] * random_.randrange(25) + [
            random_.randrange(2, 200) for _ in range(random_.randrange(4))
        ]
        engine.run(StepBatch(tuple(make_slices(lengths or [7], num_blocks, random_, step))))
    assert not compiled, set(compiled)


def make_slices(
    lengths: Sequence[int], num_blocks: int, random_: random.Random, step: int
) -> Iterator[SequenceSlice]:
    """Slices of so many tokens, each sampled in a way of its own or not at all."""
    blocks = iter(random_.sample(range(num_blocks), num_blocks))
    for place, length in enumerate(lengths):
        start = random_.randrange(40)
        table = [BlockIndex(next(blocks)) for _ in range(-(-(start + length) // 16))]
        params = SamplingParams(
            4, random_.choice((0.0, 0.9)), top_p=random_.choice((1.0, 0.9)), seed=place
        )
        spec = SampleSpec(params, 0, start + length) if random_.random() < 0.8 else None
        sequence = SequenceId(1000 * step + place)
        yield SequenceSlice(sequence, (5,) * length, start, table, spec)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_graphs_change_no_token(
    temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences join while a step that was launched ahead is computed, and end one by one."""
    folder = build_model("mixed", tmp_path)
    prompts = find_stable_prompts(folder, (50, 1, 33, 17, 9), 24)
    launched: set[tuple[int, bool]] = set()
    replay = DecodeGraphs.replay

    def watch_replay(
        graphs: DecodeGraphs, bucket: int, inputs: StepInputs, last_tokens: torch.Tensor | None
    ) -> StepOutput:
        launched.add((bucket, last_tokens is not None))
        return replay(graphs, bucket, inputs, last_tokens)

    monkeypatch.setattr(DecodeGraphs, "replay", watch_replay)
    answers = []
    for uses_graphs in (False, True):
        engine = load_model_engine(
            folder, dtype="float32", device="cuda", max_num_seqs=4, uses_graphs=uses_graphs
        )
        engine_comparisons.bind_engine(engine)
        engine.warm_up(256)
        assert not launched
        answers.append(
            engine_comparisons.generate_staggered(
                engine, [stable.prompt for stable in prompts], temperature
            )
        )
    assert answers[0] == answers[1]
    assert {bucket for bucket, _ in launched} == {1, 2, 4}
    assert any(continues for _, continues in launched)
    if not temperature:
        assert answers[0] == [
            list(stable.reference_tokens[: 4 * (place + 2)]) for place, stable in enumerate(prompts)
        ]


def test_cache_beyond_free_device_memory_is_refused(tmp_path: Path) -> None:
    engine = load_gpu_engine(build_model("llama", tmp_path))
    blocks = (256 << 20) // engine.layout.block_bytes
    needed = (blocks + 1) * engine.layout.block_bytes
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    others = torch.empty(free - (128 << 20), dtype=torch.uint8, device=CUDA)
    refused, accepted = (
        memoryview(mmap.mmap(-1, blocks * engine.layout.block_bytes)) for _ in range(2)
    )
    reason = f"needs {needed} bytes on the GPU and [0-9]+ of {total} are free"
    with pytest.raises(ConfigError, match=f"{reason}.*{re.escape('lower --kv-memory')}"):
        engine.bind_cache(refused, blocks)
    del others
    engine.bind_cache(accepted, blocks)
    assert len(generate(engine, (1, 2, 3), 4, chunk=2)) == 4


@pytest.fixture
def segments() -> Iterator[Path]:
    """A folder of a tmpfs: of other files the kernel lets nobody pin pages."""
    with tempfile.TemporaryDirectory(prefix="baton-test-", dir=DEFAULT_SEGMENT_FOLDER) as folder:
        yield Path(folder)


def test_blocks_of_the_shared_pool_are_copied_in(tmp_path: Path, segments: Path) -> None:
    folder = build_model("llama", tmp_path)
    (wanted,) = find_stable_prompts(folder, (80,), 12)
    check_reads(folder, segments, "cuda", wanted.prompt, wanted.reference_tokens, in_place=False)


def test_gpu_is_described(tmp_path: Path) -> None:
    engine = load_gpu_engine(build_model("llama", tmp_path))
    device = engine.compute_device
    assert device.device == f"cuda:{torch.cuda.current_device()}"
    assert (device.name, device.threads) == (torch.cuda.get_device_name(), 0)
    assert device.measure_memory is not None
    memory = device.measure_memory()
    assert memory is not None
    assert torch.cuda.memory_allocated() < memory.used_bytes < memory.total_bytes
    assert probe_libraries()["gpus"][torch.cuda.current_device()]["name"] == device.name


def test_unpinnable_memory_is_reported_with_a_fix(tmp_path: Path) -> None:
    engine = load_gpu_engine(build_model("llama", tmp_path))
    size = 64 * engine.layout.block_bytes
    file = tmp_path / "mapped"
    file.write_bytes(bytes(size))
    with (
        file.open("r+b") as opened,
        pytest.raises(ConfigError, match="choose one with --segment-dir"),
    ):
        engine.bind_cache(memoryview(mmap.mmap(opened.fileno(), size)), 64)
