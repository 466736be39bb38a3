"""Scores and penalties of a whole node (scheduler and ModelEngine) against transformers, in fp32: in chunks, batched
with others, resumed, and as choices of one prompt."""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from baton.block_hash import root_hash
from baton.clock import FakeClock
from baton.types import AttemptKey, Request, RequestId, SamplingParams, TokenScore, Work
from node_engine.core.block_pool import BlockPool
from node_engine.core.ledger import BlockState
from node_engine.core.outcome import Emitted, Outcome, PromptScored
from node_engine.core.scheduler import Scheduler, SchedulerLimits
from node_engine.core.sequence import Sequence
from node_engine.model import scores as scores_module
from node_engine.model.engine import ModelEngine
from tests.models import MARGIN, VOCAB, Family, build_model, load_reference

BLOCKS = 128
NEAR = 1e-4


@dataclass
class Model:
    engine: ModelEngine
    reference: PreTrainedModel

    def logits(self, tokens: tuple[int, ...]) -> torch.Tensor:  # [tokens, vocab]
        with torch.inference_mode():
            return self.reference(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module", params=["llama", "qwen2", "mistral", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family: Family = request.param
    folder = build_model(family, tmp_path_factory.getbasetemp() / "models")
    return Model(ModelEngine.load(folder), load_reference(folder))


@dataclass
class Node:
    """A scheduler over a cold cache."""

    engine: ModelEngine
    max_batched_tokens: int = 64
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arena = bytearray(BLOCKS * self.engine.layout.block_bytes)
        self.engine.bind(memoryview(self.arena), BLOCKS)
        self.pool = BlockPool(BLOCKS, 16, FakeClock())
        self.scheduler = Scheduler(self.pool, SchedulerLimits(8, self.max_batched_tokens, 2048))
        self.root = root_hash(self.engine.model_digest, self.engine.layout, b"")

    def add(self, job: Work) -> Sequence:
        return self.scheduler.add(job, self.root)

    def step(self) -> bool:
        plan = self.scheduler.next_step()
        self.outcomes += plan.outcomes
        if plan.batch is not None:
            self.outcomes += self.scheduler.update(plan.batch, self.engine.run(plan.batch))
        self.pool.check()
        return plan.batch is not None

    def run(self, *jobs: Work) -> None:
        for job in jobs:
            self.add(job)
        while self.step():
            pass
        assert self.pool.count(BlockState.IN_USE) == 0

    def tokens(self, job: Work) -> list[int]:
        return [each.event.token for each in self._emitted(job)]

    def scores(self, job: Work) -> list[TokenScore]:
        return [each.event.score for each in self._emitted(job) if each.event.score is not None]

    def prompt_scores(self, job: Work) -> list[TokenScore]:
        found: list[TokenScore] = []
        for each in self.outcomes:
            if isinstance(each, PromptScored) and each.sequence.key == job.key:
                assert each.first == len(found) + 1
                found += each.scores
        return found

    def _emitted(self, job: Work) -> list[Emitted]:
        return [each for each in self.outcomes if isinstance(each, Emitted) and each.event.key == job.key]


def work(name: str, length: int, sampling: SamplingParams, *, seed: int = 0, choice: int = 0) -> Work:
    generator = torch.Generator().manual_seed(seed)
    prompt = tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())
    key = AttemptKey(RequestId(name), 0, choice)
    return Work(key, Request(key.request, prompt, sampling, 60.0, choice=choice))


def check(found: list[TokenScore], logits: torch.Tensor, tokens: tuple[int, ...], top: int) -> None:
    """`found[i]` against row i of `logits`, for `tokens[i]`."""
    assert len(found) == len(tokens) == len(logits)
    exact = logits.log_softmax(-1)
    for score, row, token in zip(found, exact, tokens, strict=True):
        assert score.logprob == pytest.approx(float(row[token]), abs=NEAR)
        assert [logprob for _, logprob in score.top] == pytest.approx(row.topk(top).values.tolist(), abs=NEAR)
        assert [logprob for _, logprob in score.top] == pytest.approx([float(row[t]) for t, _ in score.top], abs=NEAR)


DRAWN = SamplingParams(max_tokens=12, temperature=0.9, seed=11, logprobs=5)


def test_tokens_have_the_log_probabilities_of_transformers(model: Model) -> None:
    """Raw ones, whatever the penalties and the temperature of the draw."""
    loud = replace(DRAWN, temperature=1.8, top_p=0.9, frequency_penalty=1.5, logit_bias=((5, 4.0),), logprobs=20)
    greedy = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0)
    jobs = [work("a", 70, DRAWN, seed=1), work("b", 9, loud, seed=2), work("c", 40, greedy, seed=3)]
    plain = work("d", 33, replace(DRAWN, logprobs=None), seed=4)
    node = Node(model.engine)
    node.run(*jobs, plain)
    for job in jobs:
        tokens, length = tuple(node.tokens(job)), len(job.request.prompt)
        logits = model.logits((*job.request.prompt, *tokens))[length - 1 : -1]
        check(node.scores(job), logits, tokens, job.request.sampling.logprobs or 0)
    assert node.scores(plain) == []


@pytest.mark.parametrize("pieces", [False, True], ids=["at once", "in pieces"])
def test_prompts_have_the_log_probabilities_of_transformers(
    model: Model, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of at most 64 tokens, among others; also when not even a chunk's logits fit into memory at once."""
    if pieces:
        monkeypatch.setattr(scores_module, "_LOGITS_AT_ONCE", 7 * VOCAB)
    jobs = [
        work("a", 150, replace(DRAWN, prompt_logprobs=3), seed=1),
        work("b", 1, replace(DRAWN, prompt_logprobs=3), seed=2),
        work("c", 64, replace(DRAWN, prompt_logprobs=0, logprobs=None), seed=3),
        work("d", 17, replace(DRAWN, prompt_logprobs=20), seed=4),
    ]
    plain = work("e", 90, DRAWN, seed=5)
    node = Node(model.engine)
    node.run(*jobs[:2], plain, *jobs[2:])
    for job in jobs:
        prompt = job.request.prompt
        check(node.prompt_scores(job), model.logits(prompt)[:-1], prompt[1:], job.request.sampling.prompt_logprobs or 0)
    assert node.prompt_scores(plain) == []
    alone = Node(model.engine, max_batched_tokens=512)
    alone.run(*(replace(job, request=replace(job.request, sampling=DRAWN)) for job in jobs))
    assert [alone.tokens(job) for job in jobs] == [node.tokens(job) for job in jobs], "scoring changes no token"


def test_a_scored_prompt_looks_at_no_cache(model: Model) -> None:
    node = Node(model.engine)
    first = work("a", 100, DRAWN, seed=1)
    node.run(first)
    again = work("b", 100, replace(DRAWN, prompt_logprobs=1), seed=1)
    node.run(again)
    check(node.prompt_scores(again), model.logits(again.request.prompt)[:-1], again.request.prompt[1:], 1)
    assert node.tokens(again) == node.tokens(first)


# penalties


def greedy_reference(model: Model, job: Work) -> tuple[list[int], float]:
    """transformers' repetition penalty, then OpenAI's formulas by hand; and the least margin."""
    params = job.request.sampling
    tokens, output, margin = list(job.request.prompt), Counter[int](), 9.0
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
    for _ in range(params.max_tokens):
        logits = processors(torch.tensor([tokens]), model.logits(tuple(tokens))[-1:])[0]
        for token, count in output.items():
            logits[token] -= params.frequency_penalty * count + params.presence_penalty
        for token, bias in params.logit_bias:
            logits[token] += bias
        best = logits.topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        output[tokens[-1]] += 1
    return tokens[len(job.request.prompt) :], margin


PENALTIES = {
    "repetition": {"repetition_penalty": 1.6},
    "frequency": {"frequency_penalty": 1.3},
    "presence and bias": {"presence_penalty": 2.0, "logit_bias": ((4, 3.0), (9, -100.0))},
    "all": {"repetition_penalty": 1.3, "frequency_penalty": 0.8, "presence_penalty": -0.4, "logit_bias": ((7, 1.5),)},
}


@pytest.mark.parametrize("fields", PENALTIES.values(), ids=PENALTIES)
def test_greedy_with_penalties_is_that_of_transformers(model: Model, fields: dict[str, object]) -> None:
    greedy = replace(SamplingParams(max_tokens=20, temperature=0.0), **fields)  # type: ignore[arg-type]
    jobs = {seed: work(str(seed), 20 + 3 * seed, greedy, seed=seed) for seed in range(5)}
    wanted = {seed: greedy_reference(model, job) for seed, job in jobs.items()}
    clear = [seed for seed, (_, margin) in wanted.items() if margin > MARGIN]
    assert len(clear) >= 2
    node = Node(model.engine)
    node.run(*jobs.values(), work("plain", 30, replace(DRAWN, max_tokens=20), seed=9))
    for seed in clear:
        assert node.tokens(jobs[seed]) == wanted[seed][0]


@pytest.mark.parametrize("fields", PENALTIES.values(), ids=PENALTIES)
def test_a_resumed_attempt_draws_the_same_with_penalties(model: Model, fields: dict[str, object]) -> None:
    params = replace(DRAWN, max_tokens=24, min_p=0.02, **fields)  # type: ignore[arg-type]
    job = work("a", 30, params, seed=6)
    node = Node(model.engine)
    node.run(job)
    whole = node.tokens(job)
    for cut in (1, 7, 23):
        resumed = replace(job, key=job.key._replace(attempt=cut), emitted=tuple(whole[:cut]))
        other = Node(model.engine, max_batched_tokens=32)
        other.run(work("noise", 50, DRAWN, seed=8), resumed)
        assert other.tokens(resumed) == whole[cut:]
        logits = model.logits((*job.request.prompt, *whole))[29 + cut : -1]
        check(other.scores(resumed), logits, tuple(whole[cut:]), 5)


# choices


@pytest.mark.parametrize("length", [16, 17, 30, 45])
def test_choices_of_one_prompt_share_its_blocks_and_nothing_else(model: Model, length: int) -> None:
    """The second begins while the first writes behind the prompt, the third when the first is long over."""
    params = replace(DRAWN, max_tokens=20, temperature=1.2)
    jobs = [work("a", length, params, seed=3, choice=number) for number in range(3)]
    alone = []
    for job in jobs:
        node = Node(model.engine)
        node.run(job)
        alone.append(node.tokens(job))
    node = Node(model.engine)
    first = node.add(jobs[0])
    for _ in range(6):
        node.step()
    second = node.add(jobs[1])
    while node.step():
        pass
    third = node.add(jobs[2])
    node.run()
    assert [node.tokens(job) for job in jobs] == alone
    assert [each.num_cached for each in (first, second, third)] == [0, length - 1, length - 1]
    assert len({tuple(tokens) for tokens in alone}) == 3, "each choice has noise of its own"
