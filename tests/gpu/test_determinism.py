"""`--deterministic` on an NVIDIA GPU: what a request computes does not depend on others."""

from pathlib import Path

import pytest
import torch

from baton.types import SamplingParams
from node_engine.model.model_loader import DType, load_model_engine
from tests.models import build_model, find_stable_prompts
from tests.sequence_runs import SequenceRun, ShuffledBlocks, run_step, run_to_end

pytest.importorskip("triton")

from node_engine.model.gpu.gpu_engine import GpuEngine
from tests.gpu import engine_comparisons
from tests.gpu.determinism import SCENARIOS, compare_products, find_differences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]
CUDA = torch.device("cuda")
TOLERANCE = {"float32": 2e-4, "bfloat16": 2e-2}
CHUNKED = "in chunks"


def load_engine(folder: Path, dtype: DType, *, uses_graphs: bool = True) -> GpuEngine:
    engine = load_model_engine(
        folder,
        dtype=dtype,
        device="cuda",
        max_num_seqs=8,
        deterministic=True,
        uses_graphs=uses_graphs,
    )
    assert isinstance(engine, GpuEngine)
    return engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mixed"])
def test_logits_do_not_depend_on_the_batch(family: str, dtype: DType, tmp_path: Path) -> None:
    folder = build_model(family, tmp_path)  # type: ignore[arg-type]
    engine = load_engine(folder, dtype, uses_graphs=False)
    for length in (1, 21, 150):
        assert find_differences(engine, length, set(SCENARIOS) - {CHUNKED}) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_do_not_depend_on_the_chunks(dtype: DType, tmp_path: Path) -> None:
    engine = load_engine(build_model("mixed", tmp_path), dtype, uses_graphs=False)
    for length in (21, 150):
        assert find_differences(engine, length, [CHUNKED]) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_and_batches_change_no_sampled_token(dtype: DType, tmp_path: Path) -> None:
    """Each sequence alone without graphs, and all of them in graphs of several sizes."""
    folder, answers = build_model("llama", tmp_path), []
    for is_together in (False, True):
        engine = load_engine(folder, dtype)
        engine_comparisons.bind_engine(engine)
        if is_together:
            engine.warm_up(64)
        blocks = ShuffledBlocks(engine_comparisons.NUM_BLOCKS)
        runs = [
            SequenceRun(
                tuple((number * 37 + place * 11) % 500 for place in range(5 + 9 * number)),
                blocks.allocate_blocks(5 + 9 * number + 30),
                SamplingParams(10 + 5 * number, temperature=1.0, seed=number),
            )
            for number in range(5)
        ]
        if is_together:
            run_to_end(engine, runs)
        else:
            for run in runs:
                run_step(engine, [run], [None])
                run_to_end(engine, [run])
        answers.append([run.output_tokens for run in runs])
    assert answers[0] == answers[1]


def test_tokens_equal_transformers(tmp_path: Path) -> None:
    folder = build_model("mixed", tmp_path)
    engine = load_engine(folder, "float32")
    engine_comparisons.bind_engine(engine)
    prompts = find_stable_prompts(folder, (1, 17, 130), 24)
    tokens = engine_comparisons.generate_in_chunks(engine, [p.prompt for p in prompts], 24)
    assert tokens == [list(stable.reference_tokens) for stable in prompts]


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize(
    ("in_width", "out_width", "bias"),
    [(37, 70, True), (896, 1152, True), (4096, 4096, False), (4096, 28672, False)],
)
def test_products_equal_the_reference(in_width: int, out_width: int, bias: bool, kind: str) -> None:
    error, different = compare_products(in_width, out_width, bias, getattr(torch, kind), CUDA)
    assert error < TOLERANCE[kind]
    assert different == []
