"""Sequences that tests step through an engine themselves, without a scheduler."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from baton.types import BlockIndex, SamplingParams
from node_engine.core.step.engine import Engine, LayerCallback
from node_engine.core.step.step_batch import (
    SampleSpec,
    SequenceId,
    SequenceSlice,
    SliceResult,
    StepBatch,
)

NEW_TOKENS = 48
NUM_BLOCKS = 256
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)


@dataclass
class SequenceRun:
    """A sequence on its way: what is computed, and where its KV lies."""

    prompt: tuple[int, ...]
    blocks: list[BlockIndex]
    params: SamplingParams = GREEDY
    choice: int = 0
    computed_tokens: int = 0
    output_tokens: list[int] = field(default_factory=list)

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output_tokens)

    def next_slice(self, limit: int | None = None) -> SequenceSlice:
        """The next `limit` tokens that have no KV yet; the last of them is sampled."""
        context = self.context
        end = len(context) if limit is None else min(len(context), self.computed_tokens + limit)
        spec = SampleSpec(self.params, self.choice, end) if end == len(context) else None
        return SequenceSlice(
            SequenceId(id(self)),
            context[self.computed_tokens : end],
            self.computed_tokens,
            self.blocks,
            spec,
        )

    def apply_result(self, slice_: SequenceSlice, made: SliceResult) -> None:
        if made.is_deferred:
            return
        self.computed_tokens += len(slice_.token_ids)
        assert (made.token_id is None) == (slice_.sample_spec is None)
        if made.token_id is not None:
            self.output_tokens.append(made.token_id)


class ShuffledBlocks:
    """Hands out shuffled blocks, so that nothing works by being adjacent."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, seed: int = 0) -> None:
        self._free = random.Random(seed).sample(range(num_blocks), num_blocks)

    def allocate_blocks(self, tokens: int) -> list[BlockIndex]:
        return [BlockIndex(self._free.pop()) for _ in range(-(-tokens // 16))]


def run_step(
    engine: Engine,
    runs: Sequence[SequenceRun],
    limits: Sequence[int | None],
    on_layer: LayerCallback | None = None,
) -> None:
    slices = [run.next_slice(limit) for run, limit in zip(runs, limits, strict=True)]
    for run, slice_, made in zip(
        runs, slices, engine.run(StepBatch(tuple(slices)), on_layer), strict=True
    ):
        run.apply_result(slice_, made)


def run_to_end(
    engine: Engine, runs: Sequence[SequenceRun], limits: Iterator[int] | None = None
) -> None:
    """Step all runs together until each has its tokens."""
    while running := [run for run in runs if len(run.output_tokens) < run.params.max_tokens]:
        run_step(engine, running, [next(limits) if limits else None for _ in running])
