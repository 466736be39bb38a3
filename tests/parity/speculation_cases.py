"""Requests, engines and runs of the parity tests of speculative decoding."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.process.clock import monotonic_clock
from baton.types import AttemptSpec, GrammarKind, SamplingParams, StructuredOutput, TokenEvent
from kv_kernels.native.native_library import NativeLibrary, load_library
from node_engine.model.common.base_engine import BaseEngine
from node_engine.model.cpu.native_options import NativeOptions
from node_engine.model.model_loader import load_model_engine
from node_engine.structured_output.constraint_factory import ConstraintFactory
from tests.models import VOCAB_SIZE
from tests.speculating_node import SpeculatingNode, make_speculated_work

NEW_TOKENS = 40
GREEDY = SamplingParams(NEW_TOKENS, temperature=0.0)
LENGTHS = (1, 16, 31, 130)
SAMPLED = {
    "greedy": GREEDY,
    "plain": SamplingParams(NEW_TOKENS, temperature=1.0, seed=3),
    "filters": SamplingParams(NEW_TOKENS, temperature=0.7, seed=4, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(
        NEW_TOKENS,
        temperature=0.9,
        seed=5,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
    ),
    "logprobs": SamplingParams(NEW_TOKENS, temperature=1.0, seed=6, logprobs=5),
    "bias": SamplingParams(
        NEW_TOKENS,
        temperature=1.0,
        seed=7,
        logit_bias=((5, 3.0), (9, -50.0)),
        min_tokens=20,
        stop_token_ids=tuple(range(100, 140)),
    ),
}
SCHEMA = (
    '{"type":"array","items":{"enum":["red","green","green tea",12]},"minItems":8,"maxItems":14}'
)


def load_engine(folder: Path, kernels: str, dtype: str = "auto") -> BaseEngine:
    if kernels == "torch":
        return load_model_engine(folder, dtype=dtype, device="cpu")  # type: ignore[arg-type]
    library = load_library()
    if not isinstance(library, NativeLibrary):
        pytest.skip(f"no native kernels: {library.describe()}")
    return load_model_engine(
        folder,
        dtype=dtype,  # type: ignore[arg-type]
        device="cpu",
        native=NativeOptions(library),
        threads=2,
    )


def make_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Random prompts that repeat themselves, so that drafts are found from the first step on."""
    dice = random.Random(seed)
    parts = [[dice.randrange(1, VOCAB_SIZE) for _ in range(12)] for _ in range(count)]
    return [part * 2 + part[:5] for part in parts]


def run_node(
    engine: BaseEngine, works: Sequence[AttemptSpec], max_draft_tokens: int, num_blocks: int = 128
) -> tuple[SpeculatingNode, list[list[TokenEvent]]]:
    node = SpeculatingNode(engine, max_draft_tokens, num_blocks)
    node.run_works(works)
    return node, [node.list_events(work) for work in works]


@contextmanager
def make_constrained_works(
    model: Path, count: int
) -> Iterator[tuple[ConstraintFactory, list[AttemptSpec]]]:
    """Sampled requests whose outputs obey SCHEMA, and what makes their constraints."""
    factory = ConstraintFactory(
        model / "tokenizer.json",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(0,),
        max_grammars=8,
        clock=monotonic_clock,
    )
    grammar = StructuredOutput(GrammarKind.JSON, SCHEMA)
    try:
        yield (
            factory,
            [
                make_speculated_work(
                    str(number),
                    [5, 6, 7],
                    SamplingParams(90, temperature=1.0, seed=number, structured_output=grammar),
                )
                for number in range(count)
            ],
        )
    finally:
        factory.close()


def run_constrained_works(
    node: SpeculatingNode, factory: ConstraintFactory, works: Sequence[AttemptSpec]
) -> list[list[TokenEvent]]:
    """What a node has emitted for each. A sequence whose mask is slow joins steps again later."""
    factory.set_awaited_mask_callback(node.mask_computed.set)
    node.run_works(works, {work.key: factory.make_constraint(work) for work in works})
    assert node.list_failed() == {}
    return [node.list_events(work) for work in works]


def list_contexts(
    works: Sequence[AttemptSpec], events: Sequence[Sequence[TokenEvent]]
) -> list[list[int]]:
    return [
        [*work.context_token_ids, *(event.token_id for event in each)]
        for work, each in zip(works, events, strict=True)
    ]
