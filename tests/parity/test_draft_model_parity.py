"""With a draft model a node gives the tokens that it gives without, and transformers' ones.

The draft model is the served one, whose drafts are all right, or another random one, whose drafts
are nearly all wrong.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.types import AttemptSpec, TokenEvent
from node_engine.model.common.base_engine import BaseEngine
from offline.llm import LLM
from offline.sampling_params import SamplingParams as PythonParams
from tests.models import (
    FamilyName,
    build_model,
    find_stable_prompts,
    load_reference_model,
)
from tests.parity.speculation_cases import (
    GREEDY,
    LENGTHS,
    NEW_TOKENS,
    SAMPLED,
    load_engine,
    make_constrained_works,
    make_prompts,
    run_constrained_works,
    run_node,
)
from tests.speculating_node import SpeculatingNode, make_speculated_work


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "models"


def run_drafted(
    engine: BaseEngine,
    draft_engine: BaseEngine,
    works: Sequence[AttemptSpec],
    max_draft_tokens: int = 5,
    num_draft_blocks: int = 128,
) -> tuple[SpeculatingNode, list[list[TokenEvent]]]:
    node = SpeculatingNode(
        engine,
        max_draft_tokens,
        draft_engine=draft_engine,
        num_draft_blocks=num_draft_blocks,
    )
    node.run_works(works)
    return node, [node.list_events(work) for work in works]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_greedy_tokens_are_those_of_transformers(kernels: str, folder: Path) -> None:
    model = build_model("llama", folder)
    prompts = find_stable_prompts(load_reference_model(model), LENGTHS, NEW_TOKENS)
    engine = load_engine(model, kernels)
    works = [
        make_speculated_work(str(number), stable.prompt, GREEDY)
        for number, stable in enumerate(prompts)
    ]
    for family in ("llama", "qwen3"):
        draft_engine = load_engine(build_model(family, folder), kernels)
        node, events = run_drafted(engine, draft_engine, works)
        assert [tuple(event.token_id for event in each) for each in events] == [
            stable.reference_tokens for stable in prompts
        ]
        if family == "llama":
            assert node.count_drafts("rejected") == 0
            assert len(node.batches) < NEW_TOKENS / 2
        else:
            assert node.count_drafts("rejected") > 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_tokens_and_logprobs_are_the_same_bits(dtype: str, folder: Path) -> None:
    """Also of a cache of the draft model that has room for few of the sequences."""
    engine = load_engine(build_model("llama", folder), "native", dtype)
    prompts = make_prompts(len(SAMPLED))
    works = [
        make_speculated_work(name, prompt, params)
        for (name, params), prompt in zip(SAMPLED.items(), prompts, strict=True)
    ]
    _, plain = run_node(engine, works, max_draft_tokens=0)
    cases: list[tuple[FamilyName, int]] = [("llama", 128), ("llama", 7), ("qwen3", 128)]
    for family, num_draft_blocks in cases:
        draft_engine = load_engine(build_model(family, folder), "native", dtype)
        node, speculated = run_drafted(
            engine, draft_engine, works, num_draft_blocks=num_draft_blocks
        )
        assert speculated == plain
        assert node.count_drafts("accepted") > 0
        if family == "llama":
            assert node.count_drafts("rejected") == 0, "the noise is the same"
            if num_draft_blocks > len(works) * 5:
                assert len(node.batches) < NEW_TOKENS / 2


def test_a_sequence_that_goes_on_elsewhere_is_drafted_there(folder: Path) -> None:
    """The other node has the tokens so far, and builds the draft model's KV of them again."""
    engine = load_engine(build_model("qwen2", folder), "native")
    draft_engine = load_engine(build_model("qwen2", folder), "native")
    params = replace(SAMPLED["penalties"], logprobs=2)
    work = make_speculated_work("a", make_prompts(1, seed=2)[0] * 12, params)
    _, (plain,) = run_node(engine, [work], max_draft_tokens=0)
    first = SpeculatingNode(engine, 5, draft_engine=draft_engine)
    first.scheduler.add_sequence(work, first.root)
    while len(first.list_tokens(work)) < 13:
        first.step()
    emitted = tuple(first.list_tokens(work))
    assert first.count_drafts("accepted") > 0
    second, (rest,) = run_drafted(engine, draft_engine, [replace(work, emitted_token_ids=emitted)])
    assert [*first.list_events(work), *rest] == plain
    assert second.count_drafts("accepted") > 10


def test_a_grammar_holds_at_every_drafted_position(folder: Path) -> None:
    model = build_model("llama", folder, eos_token_id=0)
    engine, draft_engine = load_engine(model, "native"), load_engine(model, "native")
    with make_constrained_works(model, 3) as (factory, works):
        plain = run_constrained_works(SpeculatingNode(engine, 0), factory, works)
        node = SpeculatingNode(engine, 5, draft_engine=draft_engine)
        assert run_constrained_works(node, factory, works) == plain


def test_an_engine_in_the_process_has_a_draft_model(folder: Path, tmp_path: Path) -> None:
    model = str(build_model("llama", folder))
    own: dict[str, Any] = {
        "dtype": "float32",
        "threads": "1",
        "device": "cpu",
        "kv_memory": "8MiB",
        "segment_dir": str(tmp_path),
    }
    params = PythonParams(temperature=1.0, seed=3, max_tokens=50, ignore_eos=True)
    prompts = [[5, 6, 7] * 20, [8, 9]]
    answers = []
    methods: list[dict[str, Any]] = [{}, {"speculative": "draft", "draft_model": model}]
    for settings in methods:
        with LLM(model, **own, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
