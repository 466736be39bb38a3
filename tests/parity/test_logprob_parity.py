"""Scores and penalties of a whole node (scheduler and BaseEngine) against transformers, in fp32:
in chunks, batched with others, resumed, and as choices of one prompt."""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from baton.kv.blocks import root_hash
from baton.process.clock import FakeClock
from baton.types import AttemptKey, AttemptSpec, Request, RequestId, SamplingParams, TokenLogprobs
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.blocks.block_records import BlockState
from node_engine.core.scheduling.capacity import SchedulerLimits
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.sequences.outcomes import (
    PromptLogprobsComputed,
    SequenceOutcome,
    TokenEmitted,
)
from node_engine.core.sequences.sequence import Sequence
from node_engine.model.common.base_engine import BaseEngine
from node_engine.model.model_loader import load_model_engine
from node_engine.model.sampling import logprobs as scores_module
from tests.models import MIN_LOGIT_MARGIN, VOCAB_SIZE, FamilyName, build_model, load_reference_model

BLOCKS = 128
TOLERANCE = 1e-4


@dataclass
class ScoredModel:
    engine: BaseEngine
    reference: PreTrainedModel

    def reference_logits(self, tokens: tuple[int, ...]) -> torch.Tensor:  # [tokens, vocab]
        with torch.inference_mode():
            logits: torch.Tensor = self.reference(torch.tensor([tokens])).logits[0]
            return logits


@pytest.fixture(scope="module", params=["llama", "qwen2", "mistral", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ScoredModel:
    family: FamilyName = request.param
    folder = build_model(family, tmp_path_factory.getbasetemp() / "models")
    return ScoredModel(load_model_engine(folder), load_reference_model(folder))


@dataclass
class ScoringNode:
    """A scheduler over a cold cache."""

    engine: BaseEngine
    max_batched_tokens: int = 64
    outcomes: list[SequenceOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arena = bytearray(BLOCKS * self.engine.layout.block_bytes)
        self.engine.bind_cache(memoryview(self.arena), BLOCKS)
        self.pool = BlockPool(BLOCKS, 16, FakeClock())
        self.scheduler = Scheduler(self.pool, SchedulerLimits(8, self.max_batched_tokens, 2048))
        self.root = root_hash(self.engine.model_digest, self.engine.layout, b"")

    def add_work(self, work: AttemptSpec) -> Sequence:
        return self.scheduler.add_sequence(work, self.root)

    def step(self) -> bool:
        plan = self.scheduler.schedule_step()
        self.outcomes += plan.outcomes
        if plan.batch is not None:
            self.outcomes += self.scheduler.update_from_results(
                plan.batch, self.engine.run(plan.batch)
            )
        self.pool.check_invariants()
        return plan.batch is not None

    def run_works(self, *works: AttemptSpec) -> None:
        for work in works:
            self.add_work(work)
        while self.step():
            pass
        assert self.pool.ownership.count_blocks(BlockState.IN_USE) == 0

    def output_tokens(self, work: AttemptSpec) -> list[int]:
        return [each.event.token_id for each in self._emitted_tokens(work)]

    def output_logprobs(self, work: AttemptSpec) -> list[TokenLogprobs]:
        return [
            each.event.logprobs
            for each in self._emitted_tokens(work)
            if each.event.logprobs is not None
        ]

    def prompt_logprobs(self, work: AttemptSpec) -> list[TokenLogprobs]:
        found: list[TokenLogprobs] = []
        for each in self.outcomes:
            if isinstance(each, PromptLogprobsComputed) and each.sequence.key == work.key:
                assert each.first_position == len(found) + 1
                found += each.logprobs
        return found

    def _emitted_tokens(self, work: AttemptSpec) -> list[TokenEmitted]:
        return [
            each
            for each in self.outcomes
            if isinstance(each, TokenEmitted) and each.event.key == work.key
        ]


def make_work(
    name: str, length: int, sampling: SamplingParams, *, seed: int = 0, choice: int = 0
) -> AttemptSpec:
    generator = torch.Generator().manual_seed(seed)
    prompt = tuple(torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist())
    key = AttemptKey(RequestId(name), 0, choice)
    return AttemptSpec(key, Request(key.request_id, prompt, sampling, 60.0, choice_index=choice))


def check_scores(
    found: list[TokenLogprobs], logits: torch.Tensor, tokens: tuple[int, ...], top: int
) -> None:
    """`found[i]` against row i of `logits`, for `tokens[i]`."""
    assert len(found) == len(tokens) == len(logits)
    exact = logits.log_softmax(-1)
    for score, row, token in zip(found, exact, tokens, strict=True):
        assert score.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
        assert [logprob for _, logprob in score.top_logprobs] == pytest.approx(
            row.topk(top).values.tolist(), abs=TOLERANCE
        )
        assert [logprob for _, logprob in score.top_logprobs] == pytest.approx(
            [float(row[t]) for t, _ in score.top_logprobs], abs=TOLERANCE
        )


SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=11, logprobs=5)


def test_output_logprobs_equal_transformers(model: ScoredModel) -> None:
    """Raw ones, whatever the penalties and the temperature of the draw."""
    loud = replace(
        SAMPLED,
        temperature=1.8,
        top_p=0.9,
        frequency_penalty=1.5,
        logit_bias=((5, 4.0),),
        logprobs=20,
    )
    greedy = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0)
    works = [
        make_work("a", 70, SAMPLED, seed=1),
        make_work("b", 9, loud, seed=2),
        make_work("c", 40, greedy, seed=3),
    ]
    plain = make_work("d", 33, replace(SAMPLED, logprobs=None), seed=4)
    node = ScoringNode(model.engine)
    node.run_works(*works, plain)
    for work in works:
        tokens, length = tuple(node.output_tokens(work)), len(work.request.prompt_token_ids)
        logits = model.reference_logits((*work.request.prompt_token_ids, *tokens))[length - 1 : -1]
        check_scores(
            node.output_logprobs(work), logits, tokens, work.request.sampling.logprobs or 0
        )
    assert node.output_logprobs(plain) == []


@pytest.mark.parametrize("slices", [False, True], ids=["at once", "in pieces"])
def test_prompt_logprobs_equal_transformers(
    model: ScoredModel, slices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of at most 64 tokens, among others; also when not even a chunk's logits fit into
    memory at once."""
    if slices:
        monkeypatch.setattr(scores_module, "_MAX_LOGITS_AT_ONCE", 7 * VOCAB_SIZE)
    works = [
        make_work("a", 150, replace(SAMPLED, prompt_logprobs=3), seed=1),
        make_work("b", 1, replace(SAMPLED, prompt_logprobs=3), seed=2),
        make_work("c", 64, replace(SAMPLED, prompt_logprobs=0, logprobs=None), seed=3),
        make_work("d", 17, replace(SAMPLED, prompt_logprobs=20), seed=4),
    ]
    plain = make_work("e", 90, SAMPLED, seed=5)
    node = ScoringNode(model.engine)
    node.run_works(*works[:2], plain, *works[2:])
    for work in works:
        prompt = work.request.prompt_token_ids
        check_scores(
            node.prompt_logprobs(work),
            model.reference_logits(prompt)[:-1],
            prompt[1:],
            work.request.sampling.prompt_logprobs or 0,
        )
    assert node.prompt_logprobs(plain) == []
    alone = ScoringNode(model.engine, max_batched_tokens=512)
    alone.run_works(
        *(replace(work, request=replace(work.request, sampling=SAMPLED)) for work in works)
    )
    assert [alone.output_tokens(work) for work in works] == [
        node.output_tokens(work) for work in works
    ], "scoring changes no token"


def test_prompt_logprobs_bypass_the_prefix_cache(model: ScoredModel) -> None:
    node = ScoringNode(model.engine)
    first = make_work("a", 100, SAMPLED, seed=1)
    node.run_works(first)
    again = make_work("b", 100, replace(SAMPLED, prompt_logprobs=1), seed=1)
    node.run_works(again)
    check_scores(
        node.prompt_logprobs(again),
        model.reference_logits(again.request.prompt_token_ids)[:-1],
        again.request.prompt_token_ids[1:],
        1,
    )
    assert node.output_tokens(again) == node.output_tokens(first)


# penalties


def greedy_reference(model: ScoredModel, work: AttemptSpec) -> tuple[list[int], float]:
    """transformers' repetition penalty, then OpenAI's formulas by hand; and the least margin."""
    params = work.request.sampling
    tokens, output, margin = list(work.request.prompt_token_ids), Counter[int](), 9.0
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
    for _ in range(params.max_tokens):
        logits = model.reference_logits(tuple(tokens))[-1:]
        logits = processors(torch.LongTensor([tokens]), logits)[0]
        for token, count in output.items():
            logits[token] -= params.frequency_penalty * count + params.presence_penalty
        for token, bias in params.logit_bias:
            logits[token] += bias
        best = logits.topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        output[tokens[-1]] += 1
    return tokens[len(work.request.prompt_token_ids) :], margin


PENALTIES = {
    "repetition": {"repetition_penalty": 1.6},
    "frequency": {"frequency_penalty": 1.3},
    "presence and bias": {"presence_penalty": 2.0, "logit_bias": ((4, 3.0), (9, -100.0))},
    "all": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.8,
        "presence_penalty": -0.4,
        "logit_bias": ((7, 1.5),),
    },
}


@pytest.mark.parametrize("fields", PENALTIES.values(), ids=PENALTIES)
def test_greedy_with_penalties_equals_transformers(
    model: ScoredModel, fields: dict[str, object]
) -> None:
    greedy = SamplingParams(max_tokens=20, temperature=0.0)
    greedy = replace(greedy, **fields)  # type: ignore[arg-type]
    works = {seed: make_work(str(seed), 20 + 3 * seed, greedy, seed=seed) for seed in range(5)}
    wanted = {seed: greedy_reference(model, work) for seed, work in works.items()}
    clear = [seed for seed, (_, margin) in wanted.items() if margin > MIN_LOGIT_MARGIN]
    assert len(clear) >= 2
    node = ScoringNode(model.engine)
    node.run_works(*works.values(), make_work("plain", 30, replace(SAMPLED, max_tokens=20), seed=9))
    for seed in clear:
        assert node.output_tokens(works[seed]) == wanted[seed][0]


@pytest.mark.parametrize("fields", PENALTIES.values(), ids=PENALTIES)
def test_resumed_attempt_samples_the_same_tokens_with_penalties(
    model: ScoredModel, fields: dict[str, object]
) -> None:
    params = replace(SAMPLED, max_tokens=24, min_p=0.02, **fields)  # type: ignore[arg-type]
    work = make_work("a", 30, params, seed=6)
    node = ScoringNode(model.engine)
    node.run_works(work)
    whole = node.output_tokens(work)
    for cut in (1, 7, 23):
        resumed = replace(
            work, key=work.key._replace(attempt_number=cut), emitted_token_ids=tuple(whole[:cut])
        )
        other = ScoringNode(model.engine, max_batched_tokens=32)
        other.run_works(make_work("noise", 50, SAMPLED, seed=8), resumed)
        assert other.output_tokens(resumed) == whole[cut:]
        logits = model.reference_logits((*work.request.prompt_token_ids, *whole))[29 + cut : -1]
        check_scores(other.output_logprobs(resumed), logits, tuple(whole[cut:]), 5)


# choices


@pytest.mark.parametrize("length", [16, 17, 30, 45])
def test_choices_of_one_prompt_share_its_blocks_and_nothing_else(
    model: ScoredModel, length: int
) -> None:
    """The second begins while the first writes behind the prompt, the third when the first is long
    over."""
    params = replace(SAMPLED, max_tokens=20, temperature=1.2)
    works = [make_work("a", length, params, seed=3, choice=number) for number in range(3)]
    alone = []
    for work in works:
        node = ScoringNode(model.engine)
        node.run_works(work)
        alone.append(node.output_tokens(work))
    node = ScoringNode(model.engine)
    first = node.add_work(works[0])
    for _ in range(6):
        node.step()
    second = node.add_work(works[1])
    while node.step():
        pass
    third = node.add_work(works[2])
    node.run_works()
    assert [node.output_tokens(work) for work in works] == alone
    assert [each.num_cached_tokens for each in (first, second, third)] == [
        0,
        length - 1,
        length - 1,
    ]
    assert len({tuple(tokens) for tokens in alone}) == 3, "each choice has noise of its own"
