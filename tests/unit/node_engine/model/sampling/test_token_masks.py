"""Masks of grammars: only allowed tokens are drawn, as if the others did not exist."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from baton.errors import NodeFailed
from baton.types import SamplingParams
from node_engine.core.step.step_batch import SampleSpec
from node_engine.model.sampling.sampler import draw_token, sample_tokens
from node_engine.model.sampling.token_masks import apply_masks
from tests.token_masks import FixedTokenMask

VOCAB = 71  # not a multiple of 32
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
DRAWN = SamplingParams(max_tokens=1, temperature=1.3, top_p=0.9, top_k=9, min_p=0.01, seed=3)


def fixed_mask(allowed: tuple[int, ...]) -> FixedTokenMask:
    return FixedTokenMask(allowed, VOCAB)


def logits_of(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)).to(dtype) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_tokens_become_minus_infinity(dtype: torch.dtype) -> None:
    logits, masks = logits_of(4, dtype), {1: (0, 31, 32, 63, 64, 70), 3: (5,)}
    expected = logits.clone()
    for row, allowed in masks.items():
        others = [token for token in range(VOCAB) if token not in allowed]
        expected[row, others] = -torch.inf
    apply_masks(logits, [(row, fixed_mask(allowed)) for row, allowed in masks.items()])
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", [GREEDY, DRAWN, replace(DRAWN, top_k=0, top_p=1.0, min_p=0.0)])
def test_a_row_is_drawn_among_its_allowed_tokens(
    params: SamplingParams, dtype: torch.dtype
) -> None:
    """Alone or beside others, with the noise of the same tokens."""
    logits, allowed = logits_of(5, dtype), (2, 40, 69)
    found = []
    for position in range(40):
        spec = SampleSpec(params, 1, position, mask=fixed_mask(allowed))
        plain = SampleSpec(GREEDY, 0, position)
        specs = [plain, spec, plain, spec, plain]
        together = sample_tokens(logits.clone(), specs)
        alone = sample_tokens(logits[3:4].clone(), [spec])
        masked = logits[3].float().numpy().copy()
        masked[[token for token in range(VOCAB) if token not in allowed]] = -np.inf
        wanted = draw_token(masked, spec) if params.temperature else int(masked.argmax())
        assert together[3] == alone[0]
        assert together[3].token_id == wanted
        assert [together[row].token_id for row in (0, 2, 4)] == [
            int(logits[row].argmax()) for row in (0, 2, 4)
        ]
        found.append(wanted)
    assert set(found) <= set(allowed)
    assert (len(set(found)) > 1) == bool(params.temperature)


def test_a_bias_cannot_forbid_all_that_a_grammar_allows() -> None:
    params = replace(GREEDY, logit_bias=((7, -100.0), (8, -100.0)))
    spec = SampleSpec(params, 0, 0, mask=fixed_mask((7, 8)))
    assert sample_tokens(logits_of(1), [spec])[0].token_id in (7, 8)


def test_logprobs_are_those_of_the_unmasked_logits() -> None:
    logits = logits_of(1)
    spec = SampleSpec(replace(GREEDY, logprobs=2), 0, 0, mask=fixed_mask((9,)))
    (result,) = sample_tokens(logits.clone(), [spec])
    assert result.token_id == 9
    assert result.logprobs is not None
    assert result.logprobs.logprob == pytest.approx(float(logits[0].log_softmax(-1)[9]))


@pytest.mark.parametrize("damaged", [9, 10])
def test_damaged_logits_are_found_behind_a_mask(damaged: int) -> None:
    logits = logits_of(1)
    logits[0, damaged] = torch.nan
    with pytest.raises(NodeFailed):
        sample_tokens(logits, [SampleSpec(DRAWN, 0, 0, mask=fixed_mask((9,)))])
