"""The logits of one sequence, computed alone and beside others, in one or in several chunks.

Runs on a GPU, and in Triton's interpreter."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch

from baton.types import SamplingParams
from kv_kernels.reference.linear import PlainLinear
from kv_kernels.triton.batch_invariant_linear import BatchInvariantLinear
from node_engine.core.step.step_batch import PromptLogprobsSpec, SliceResult, StepBatch
from node_engine.model.gpu import gpu_engine
from node_engine.model.gpu.draws import read_draws
from node_engine.model.gpu.gpu_engine import GpuEngine
from node_engine.model.gpu.step_inputs import StepInputs
from tests.gpu.engine_comparisons import NUM_BLOCKS, bind_engine
from tests.sequence_runs import SequenceRun, ShuffledBlocks, run_step

OUTPUT_TOKENS = 3
MAX_PROMPT = 28  # tokens; more than all chunks of `run_beside_chunks`

# Steps `target` to its end, beside the others.
Scenario = Callable[[GpuEngine, SequenceRun, list[SequenceRun]], None]


def run_alone(engine: GpuEngine, target: SequenceRun, others: list[SequenceRun]) -> None:
    while len(target.output_tokens) < OUTPUT_TOKENS:
        run_step(engine, [target], [None])


def run_in_batch(engine: GpuEngine, target: SequenceRun, others: list[SequenceRun]) -> None:
    """Five prompts at once, then five decode slices."""
    while len(target.output_tokens) < OUTPUT_TOKENS:
        run_step(engine, [*others[:2], target, *others[2:]], [None] * 5)


def run_beside_chunks(engine: GpuEngine, target: SequenceRun, others: list[SequenceRun]) -> None:
    """Each step has a prefill chunk of another prompt."""
    others = sorted(others, key=lambda run: -len(run.prompt))
    while len(target.output_tokens) < OUTPUT_TOKENS:
        run_step(engine, [others[0], target], [9, None])


def run_beside_scored_prompt(
    engine: GpuEngine, target: SequenceRun, others: list[SequenceRun]
) -> None:
    """Each step scores another prompt, so that all of its rows are computed to the end."""
    while len(target.output_tokens) < OUTPUT_TOKENS:
        slice_, other = target.next_slice(), others[0].next_slice()
        scored = replace(other, logprobs_spec=PromptLogprobsSpec(other.token_ids, 1))
        made, _ = engine.run(StepBatch((slice_, scored)))
        target.apply_result(slice_, made)


def run_in_chunks(engine: GpuEngine, target: SequenceRun, others: list[SequenceRun]) -> None:
    """The prompt in chunks of one token and of several."""
    sizes = [1, 7, 2, 1]
    while len(target.output_tokens) < OUTPUT_TOKENS:
        run_step(engine, [target], [sizes.pop() if sizes else None])


SCENARIOS: dict[str, Scenario] = {
    "in a batch": run_in_batch,
    "beside chunks": run_beside_chunks,
    "beside a scored prompt": run_beside_scored_prompt,
    "in chunks": run_in_chunks,
}


def collect_logits(
    engine: GpuEngine,
    scenario: Scenario,
    length: int,
    prepare: Callable[[GpuEngine], None] = lambda _: None,
) -> list[bytes]:
    """The logits of each output token of a prompt of `length` tokens, bit by bit.

    `prepare` is called when the cache is bound.
    """
    memory = bind_engine(engine)
    prepare(engine)
    blocks = ShuffledBlocks(NUM_BLOCKS)

    def make_run(number: int, tokens: int) -> SequenceRun:
        prompt = tuple((number * 101 + place * place * 7) % 500 for place in range(tokens))
        params = SamplingParams(OUTPUT_TOKENS, temperature=0.0, seed=number)
        return SequenceRun(prompt, blocks.allocate_blocks(tokens + OUTPUT_TOKENS), params)

    others = [make_run(number, size) for number, size in enumerate((20, 1, 3, MAX_PROMPT))]
    target = make_run(9, length)
    found: list[bytes] = []
    with recorded_logits(target.params, found):
        scenario(engine, target, others)
    del memory
    assert len(found) == OUTPUT_TOKENS
    return found


@contextmanager
def recorded_logits(params: SamplingParams, found: list[bytes]) -> Iterator[None]:
    """Append the logits of each draw of the sequence with these parameters."""

    def read_and_record(
        inputs: StepInputs, logits: torch.Tensor, tokens: list[int]
    ) -> list[SliceResult]:
        for row, spec in zip(logits.cpu(), inputs.sample_specs, strict=False):
            if spec.params is params:
                found.append(row.contiguous().view(torch.uint8).numpy().tobytes())
        return read_draws(inputs, logits, tokens)

    with mock.patch.object(gpu_engine, "read_draws", read_and_record):
        yield


def find_differences(
    engine: GpuEngine,
    length: int,
    scenarios: Iterable[str] = tuple(SCENARIOS),
    alone: list[bytes] | None = None,
) -> list[str]:
    """The scenarios whose logits differ in any bit from those of the sequence alone.

    `alone` has the latter if they are known already.
    """
    if alone is None:
        alone = collect_logits(engine, run_alone, length)
    return [name for name in scenarios if collect_logits(engine, SCENARIOS[name], length) != alone]


def compare_products(
    in_width: int, out_width: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> tuple[float, list[int]]:
    """The error of BatchInvariantLinear, and the row counts with which the first row differs."""

    def randn(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    x = randn(130, in_width, seed=0)
    weight = randn(out_width, in_width, seed=1) / in_width**0.5
    added = randn(out_width, seed=2) if bias else None
    exact = PlainLinear(weight.float(), None if added is None else added.float())(x.float())
    linear = BatchInvariantLinear(
        weight.to(device),
        None if added is None else added.to(device),
        upcast=device.type == "cpu",
    )
    whole = linear(x.to(device)).cpu()
    error = float(((whole.float() - exact).abs() / (1.0 + exact.abs())).max())
    moved = {count: linear(x[-count:].to(device)).cpu() for count in (1, 5, 64, 129)}
    different = [count for count, part in moved.items() if not torch.equal(part, whole[-count:])]
    residual = randn(130, out_width, seed=3)
    total = linear(x.to(device), residual.clone().to(device)).cpu()
    assert torch.equal(total, residual + whole)
    return error, different
