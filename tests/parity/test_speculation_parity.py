"""With speculative decoding a node gives the tokens that it gives without, and transformers' ones.

Drafts come from the sequence itself, or are known outputs with errors, so that many are right. The
native engine computes the same bits in any batch and chunk, so its tokens and logprobs have to be
equal for every sampling parameter and dtype.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from baton.types import TokenEvent
from node_engine.structured_output import grammar_state
from tests.models import FamilyName, build_model, find_stable_prompts
from tests.models import load_reference_model as load_reference
from tests.parity.speculation_cases import (
    GREEDY,
    LENGTHS,
    NEW_TOKENS,
    SAMPLED,
    list_contexts,
    load_engine,
    make_constrained_works,
    make_prompts,
    run_constrained_works,
    run_node,
)
from tests.speculating_node import SpeculatingNode, knowing_proposers, make_speculated_work


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "models"


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
    with make_constrained_works(model, 4) as (factory, works):
        plain = run_constrained_works(SpeculatingNode(engine, 0), factory, works)
        assert all(each[-1].finish_reason is not None for each in plain)
        node = SpeculatingNode(engine, 5)
        assert run_constrained_works(node, factory, works) == plain
        if has_slow_masks:
            assert node.count_drafts("accepted") == 0
            return
        assert node.count_drafts("accepted") > 20, "the elements recur"
        with knowing_proposers(list_contexts(works, plain), 0.2):
            node = SpeculatingNode(engine, 8)
            assert run_constrained_works(node, factory, works) == plain
        assert node.count_drafts("accepted") > node.count_drafts("rejected") > 0
