"""With speculative decoding a node gives the tokens that it gives without, and transformers' ones.

Drafts come from the sequence itself, or are known outputs with errors, so that many are right. The
native engine computes the same bits in any batch and chunk, so its tokens and logprobs have to be
equal for every sampling parameter and dtype.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from baton.process.clock import monotonic_clock
from baton.types import AttemptSpec, GrammarKind, SamplingParams, StructuredOutput, TokenEvent
from kv_kernels.native.native_library import NativeLibrary, load_library
from node_engine.model.common.base_engine import BaseEngine
from node_engine.model.model_loader import load_model_engine
from node_engine.structured_output import grammar_state
from node_engine.structured_output.constraint_factory import ConstraintFactory
from tests.models import VOCAB_SIZE, FamilyName, build_model, find_stable_prompts
from tests.models import load_reference_model as load_reference
from tests.speculating_node import SpeculatingNode, knowing_proposers, make_speculated_work

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "models"


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
        native_library=library,
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


def list_contexts(
    works: Sequence[AttemptSpec], events: Sequence[Sequence[TokenEvent]]
) -> list[list[int]]:
    return [
        [*work.context_token_ids, *(event.token_id for event in each)]
        for work, each in zip(works, events, strict=True)
    ]


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_greedy_tokens_are_those_of_transformers(
    family: FamilyName, kernels: str, folder: Path
) -> None:
    model = build_model(family, folder)
    reference: PreTrainedModel = load_reference(model)
    prompts = find_stable_prompts(reference, LENGTHS, NEW_TOKENS)
    engine = load_engine(model, kernels)
    works = [
        make_speculated_work(str(number), stable.prompt, GREEDY)
        for number, stable in enumerate(prompts)
    ]
    known = [[*stable.prompt, *stable.reference_tokens] for stable in prompts]
    for error_share in (0.0, 0.3):
        with knowing_proposers(known, error_share):
            node, events = run_node(engine, works, max_draft_tokens=5)
        assert [tuple(event.token_id for event in each) for each in events] == [
            stable.reference_tokens for stable in prompts
        ]
        assert node.count_drafts("accepted") > 2 * NEW_TOKENS
        assert (node.count_drafts("rejected") > 10) == (error_share > 0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_tokens_and_logprobs_are_the_same_bits(dtype: str, folder: Path) -> None:
    engine = load_engine(build_model("llama", folder), "native", dtype)
    prompts = make_prompts(len(SAMPLED))
    works = [
        make_speculated_work(name, prompt, params)
        for (name, params), prompt in zip(SAMPLED.items(), prompts, strict=True)
    ]
    _, plain = run_node(engine, works, max_draft_tokens=0)
    _, by_ngrams = run_node(engine, works, max_draft_tokens=4)
    assert by_ngrams == plain
    for error_share, max_draft_tokens in ((0.1, 7), (0.5, 3)):
        with knowing_proposers(list_contexts(works, plain), error_share):
            node, speculated = run_node(engine, works, max_draft_tokens)
        assert speculated == plain
        assert node.count_drafts("accepted") > 30
        assert node.count_drafts("rejected") > 5
        assert len(node.batches) < NEW_TOKENS


def test_a_tiny_cache_preempts_and_nothing_changes(folder: Path) -> None:
    """Preempted attempts go on as others do after a failure: with their tokens as context."""
    engine = load_engine(build_model("qwen2", folder), "native")
    params = replace(SAMPLED["penalties"], logprobs=2)
    works = [
        make_speculated_work(str(number), prompt, params)
        for number, prompt in enumerate(make_prompts(5, seed=2))
    ]
    _, plain = run_node(engine, works, max_draft_tokens=0)
    contexts = list_contexts(works, plain)
    left = dict(zip([work.key for work in works], works, strict=True))
    found: dict[str, list[TokenEvent]] = {str(number): [] for number in range(len(works))}
    num_preempted = 0
    while left:
        with knowing_proposers(contexts, 0.2, seed=num_preempted):
            node = SpeculatingNode(engine, 6, num_blocks=10)
            node.run_works(list(left.values()))
        for work in left.values():
            found[work.key.request_id] += node.list_events(work)
        failed = node.list_failed()
        assert set(failed.values()) <= {"preempted"}
        num_preempted += len(failed)
        left = {
            key: replace(
                work,
                emitted_token_ids=tuple(event.token_id for event in found[work.key.request_id]),
            )
            for key, work in left.items()
            if key in failed
        }
    assert num_preempted > 0
    assert list(found.values()) == plain


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("has_slow_masks", [False, True])
def test_a_grammar_holds_at_every_drafted_position(
    kernels: str, has_slow_masks: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a loaded machine any mask may be slow: nothing is drafted after it.
    monkeypatch.setattr(grammar_state, "SLOW_MASK_SECONDS", -1.0 if has_slow_masks else math.inf)
    model = build_model("llama", folder, eos_token_id=0)
    engine = load_engine(model, kernels)
    factory = ConstraintFactory(
        model / "tokenizer.json",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(0,),
        max_grammars=8,
        clock=monotonic_clock,
    )
    grammar = StructuredOutput(GrammarKind.JSON, SCHEMA)
    works = [
        make_speculated_work(
            str(number),
            [5, 6, 7],
            SamplingParams(90, temperature=1.0, seed=number, structured_output=grammar),
        )
        for number in range(4)
    ]

    def run_constrained(max_draft_tokens: int) -> tuple[SpeculatingNode, list[list[TokenEvent]]]:
        node = SpeculatingNode(engine, max_draft_tokens)
        factory.set_awaited_mask_callback(node.mask_computed.set)
        node.run_works(works, {work.key: factory.make_constraint(work) for work in works})
        assert node.list_failed() == {}
        return node, [node.list_events(work) for work in works]

    _, plain = run_constrained(0)
    node, speculated = run_constrained(5)
    assert speculated == plain
    assert all(each[-1].finish_reason is not None for each in plain)
    if has_slow_masks:
        assert node.count_drafts("accepted") == 0
        factory.close()
        return
    assert node.count_drafts("accepted") > 20, "the elements recur"
    with knowing_proposers(list_contexts(works, plain), 0.2):
        node, speculated = run_constrained(8)
    assert speculated == plain
    assert node.count_drafts("accepted") > node.count_drafts("rejected") > 0
    factory.close()
