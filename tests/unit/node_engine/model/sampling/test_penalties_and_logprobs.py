"""Penalties, bias, min_p and scores against plain formulas and transformers' own processors."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from baton.errors import NodeFailed
from baton.types import SamplingParams
from node_engine.core.step.step_batch import SampleSpec, TokenCounts
from node_engine.model.sampling.logprobs import compute_logprobs, compute_rows_at_once
from node_engine.model.sampling.sampler import draw_token, sample_tokens

VOCAB = 40
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
DRAWN = SamplingParams(max_tokens=1, temperature=1.3, seed=7)
PROMPT, OUTPUT = (3, 5, 5, 9), (5, 7, 7, 7, 3)


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def counts(
    params: SamplingParams, prompt: Sequence[int] = PROMPT, output: Sequence[int] = OUTPUT
) -> TokenCounts:
    made = TokenCounts(prompt if params.repetition_penalty != 1.0 else ())
    made.add_output_tokens(output)
    return made


def spec(params: SamplingParams, position: int = 9, **others: object) -> SampleSpec:
    made = SampleSpec(
        params, 0, position, token_counts=counts(params) if params.has_penalties else None
    )
    return replace(made, **others)  # type: ignore[arg-type]


def by_the_formulas(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """[vocab], one token after the other."""
    changed, seen = logits.tolist(), Counter(OUTPUT)
    for token in range(VOCAB):
        if token in (*PROMPT, *OUTPUT):
            value = changed[token]
            changed[token] = (
                value / params.repetition_penalty
                if value > 0
                else value * params.repetition_penalty
            )
        changed[token] -= params.frequency_penalty * seen[token] + params.presence_penalty * (
            seen[token] > 0
        )
        changed[token] += sum(bias for biased, bias in params.logit_bias if biased == token)
    return torch.tensor(changed)


PENALIZED = {
    "presence": replace(GREEDY, presence_penalty=1.5),
    "frequency": replace(GREEDY, frequency_penalty=-1.2),
    "repetition": replace(GREEDY, repetition_penalty=3.0),
    "repetition below 1": replace(GREEDY, repetition_penalty=0.2),
    "bias": replace(GREEDY, logit_bias=((7, 6.5), (11, -100.0), (0, 2.0))),
    "all": replace(
        GREEDY,
        presence_penalty=-0.5,
        frequency_penalty=0.7,
        repetition_penalty=1.4,
        logit_bias=((7, 2.0), (12, 3.0), (7, 1.0)),
    ),
}


@pytest.mark.parametrize("params", PENALIZED.values(), ids=PENALIZED)
def test_greedy_takes_the_best_of_the_changed_logits(params: SamplingParams) -> None:
    changed = 0
    for seed in range(40):
        logits = logits_of(1, seed)
        [made] = sample_tokens(logits.clone(), [spec(params)])
        assert made.token_id == int(by_the_formulas(logits[0], params).argmax())
        changed += made.token_id != int(logits[0].argmax())
    assert changed, "the penalty has never mattered"


@pytest.mark.parametrize("params", PENALIZED.values(), ids=PENALIZED)
def test_draws_come_from_the_changed_logits(params: SamplingParams) -> None:
    drawn = replace(params, temperature=0.9, seed=3, top_p=0.9)
    for seed in range(20):
        logits = logits_of(1, seed)
        [made] = sample_tokens(logits.clone(), [spec(drawn, seed)])
        assert made.token_id == draw_token(
            by_the_formulas(logits[0], params).numpy(), SampleSpec(drawn, 0, seed)
        )


@pytest.mark.parametrize("penalty", [0.3, 1.7])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    context = torch.tensor([[*PROMPT, *OUTPUT]])
    params = replace(GREEDY, repetition_penalty=penalty)
    for seed in range(40):
        logits = logits_of(1, seed)
        [made] = sample_tokens(logits.clone(), [spec(params)])
        assert made.token_id == int(processor(context, logits.clone()).argmax())


@pytest.mark.parametrize("min_p", [0.02, 0.2, 0.9, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float) -> None:
    """After the temperature, as vLLM has it."""
    logits = logits_of(1)
    params = replace(DRAWN, min_p=min_p)
    kept = MinPLogitsWarper(min_p)(torch.LongTensor([[0]]), logits / params.temperature)[
        0
    ].isfinite()
    drawn = {
        draw_token(logits[0].numpy(), SampleSpec(params, 0, position)) for position in range(2000)
    }
    assert drawn <= set(kept.nonzero().flatten().tolist())
    assert len(drawn) >= min(3, int(kept.sum()))


def test_top_p_is_of_what_min_p_leaves() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    without = replace(DRAWN, temperature=1.0, top_p=0.75)
    drawn = {draw_token(logits, SampleSpec(without, 0, n)) for n in range(500)}
    both = {draw_token(logits, SampleSpec(replace(without, min_p=0.6), 0, n)) for n in range(500)}
    assert (drawn, both) == ({0, 1, 2}, {0, 1}), (
        "of 0.4 and 0.3, 0.57 and 0.43 are left: 0.75 takes both"
    )
    narrow = replace(without, top_p=0.5, min_p=0.6)
    assert {draw_token(logits, SampleSpec(narrow, 0, n)) for n in range(500)} == {0}


def test_penalties_never_undo_a_ban() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 30.0
    loud = replace(GREEDY, frequency_penalty=-2.0, presence_penalty=-2.0, repetition_penalty=0.01)
    banned = sample_tokens(
        logits.clone(), [spec(replace(loud, logit_bias=((5, -100.0),)), forbidden_token_ids=())]
    )
    # The repetition penalty makes 3000 of 30: a bias of 100 cannot hold that, being forbidden can.
    assert banned[0].token_id == 5
    assert sample_tokens(logits.clone(), [spec(loud, forbidden_token_ids=(5,))])[0].token_id != 5
    low = torch.zeros(1, VOCAB)
    low[0, 5] = -1.0
    assert (
        sample_tokens(
            low, [spec(replace(GREEDY, repetition_penalty=0.01, logit_bias=((5, 100.0),)))]
        )[0].token_id
        == 5
    )


def test_a_row_is_the_same_in_any_batch_and_others_are_untouched() -> None:
    rows = logits_of(8, 1)
    plain = replace(DRAWN, logprobs=2)
    kinds = [
        *(replace(params, temperature=0.7, seed=9) for params in PENALIZED.values()),
        plain,
        DRAWN,
    ]
    specs = [spec(params, 3) for params in kinds]
    together = sample_tokens(rows.clone(), specs)
    backwards = sample_tokens(rows.flip(0).clone(), specs[::-1])[::-1]
    alone = [sample_tokens(rows[i : i + 1].clone(), specs[i : i + 1])[0] for i in range(8)]
    assert (
        [each.token_id for each in together]
        == [each.token_id for each in backwards]
        == [each.token_id for each in alone]
    )
    assert [each.logprobs is not None for each in together] == [False] * 6 + [True, False]


def test_bfloat16_logits_are_penalized_in_float32() -> None:
    logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    logits[0, 5], logits[0, 6] = 16.0, 16.0
    params = replace(GREEDY, logit_bias=((5, 0.011), (6, 0.012)))
    assert sample_tokens(logits, [spec(params)])[0].token_id == 6, "bfloat16 has no 16.011"


# counts


@given(
    st.lists(st.integers(0, 200), max_size=50),
    st.lists(st.lists(st.integers(0, 300), max_size=80), max_size=5),
)
def test_incremental_counts_equal_counts_at_once(
    prompt: list[int], slices: list[list[int]]
) -> None:
    made, output = TokenCounts(prompt), Counter[int]()
    for slice_ in slices:
        made.add_output_tokens(slice_)
        output.update(slice_)
    assert dict(zip(made.token_ids.tolist(), made.output_counts.tolist(), strict=True)) == {
        token: output[token] for token in {*prompt, *output}
    }
    assert made.num_output_tokens == output.total()


@given(
    st.lists(st.integers(0, 20), max_size=20),
    st.lists(st.integers(0, 30), max_size=20),
    st.lists(st.integers(0, 40), max_size=12),
)
def test_counts_of_a_draft_are_those_of_an_output_and_leave_no_trace(
    prompt: list[int], output: list[int], draft: list[int]
) -> None:
    counts, expected = TokenCounts(prompt), TokenCounts(prompt)
    counts.add_output_tokens(output)
    expected.add_output_tokens([*output, *draft])
    before = counts.token_ids.tolist(), counts.output_counts.tolist()
    drafted = counts.count_draft(draft)
    assert dict(zip(drafted.token_ids.tolist(), drafted.output_counts.tolist(), strict=True)) == (
        dict(zip(expected.token_ids.tolist(), expected.output_counts.tolist(), strict=True))
    )
    assert drafted.output_counts.dtype == expected.output_counts.dtype
    assert (counts.token_ids.tolist(), counts.output_counts.tolist()) == before


# scores


def test_scores_are_of_the_raw_logits() -> None:
    logits = logits_of(4, 3)
    everything = replace(PENALIZED["all"], temperature=0.4, top_k=3, seed=1)
    kinds = [
        replace(GREEDY, logprobs=3),
        GREEDY,
        replace(everything, logprobs=0),
        replace(everything, logprobs=20),
    ]
    made = sample_tokens(logits.clone(), [spec(params) for params in kinds])
    exact = logits.double().log_softmax(-1)
    assert made[1].logprobs is None
    for row, top in ((0, 3), (2, 0), (3, 20)):
        score = made[row].logprobs
        assert score is not None
        assert made[row].token_id is not None
        assert score.logprob == pytest.approx(float(exact[row, made[row].token_id]), abs=1e-5)
        best = exact[row].topk(top)
        assert [token for token, _ in score.top_logprobs] == best.indices.tolist()
        assert [logprob for _, logprob in score.top_logprobs] == pytest.approx(
            best.values.tolist(), abs=1e-5
        )


def test_logprobs_are_never_above_zero() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 1e4
    [score] = compute_logprobs(logits, [4], [1])
    assert score.logprob == 0.0
    assert score.top_logprobs == ((4, 0.0),)


def test_top_logprobs_are_capped_by_the_vocabulary() -> None:
    [score] = compute_logprobs(torch.zeros(1, 3), [1], [20])
    assert len(score.top_logprobs) == 3


def test_damaged_logits_have_no_scores() -> None:
    with pytest.raises(NodeFailed, match="not finite"):
        compute_logprobs(torch.full((1, 4), torch.nan), [1], [2])


def test_prompt_scoring_bounds_logits_memory() -> None:
    assert compute_rows_at_once(151_936) * 151_936 * 4 <= 64 << 20
    assert compute_rows_at_once(1 << 30) == 1
