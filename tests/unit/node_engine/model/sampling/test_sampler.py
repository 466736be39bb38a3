"""The sampler's noise, its filters, and its independence of everything but what it may depend
on."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from baton.errors import NodeFailed
from baton.types import SamplingParams
from node_engine.core.step.step_batch import SampleSpec
from node_engine.model.sampling.philox import WORD_MASK, philox4x32
from node_engine.model.sampling.sampler import compute_gumbel_noise, draw_token, sample_tokens

DRAWN = SamplingParams(max_tokens=1, temperature=1.0, seed=12345)
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)

# The known answers for philox4x32-10 that Random123 is distributed with: counter, key, result.
KNOWN_ANSWERS = [
    ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD_MASK,) * 4, (WORD_MASK, WORD_MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def spec(position: int = 0, params: SamplingParams = DRAWN, **others: object) -> SampleSpec:
    made = SampleSpec(params, choice_index=0, position=position)
    return replace(made, **others)  # type: ignore[arg-type]


def logits_of(size: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 2).astype(np.float32)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    counters = tuple(np.array([word, 7], dtype=np.uint64) for word in counter)
    words = philox4x32(counters, key)  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in words) == expected


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for() -> None:
    whole = compute_gumbel_noise(1003, spec())
    few, many = np.array([0, 5, 6, 1002]), np.arange(2, 1003)
    assert np.array_equal(compute_gumbel_noise(1003, spec(), few), whole[few])
    assert np.array_equal(compute_gumbel_noise(1003, spec(), many), whole[many])


@pytest.mark.parametrize(
    "filtered",
    [DRAWN, replace(DRAWN, top_p=0.5), replace(DRAWN, min_p=0.1), replace(DRAWN, top_k=3)],
)
@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-45, 1e-40, 1e-30])
def test_tiny_temperature_is_greedy(temperature: float, filtered: SamplingParams) -> None:
    """The smallest ones are 0 in float32, in which logits are divided."""
    logits = logits_of(1003)
    params = replace(filtered, temperature=temperature)
    (result,) = sample_tokens(torch.from_numpy(logits)[None], [spec(params=params)])
    assert result.token_id == logits.argmax()


def test_noise_depends_on_seed_choice_and_position() -> None:
    high = replace(DRAWN, seed=DRAWN.seed + (1 << 40))
    specs = [
        spec(),
        spec(1),
        spec(choice_index=1),
        spec(params=replace(DRAWN, seed=1)),
        spec(params=high),
    ]
    noises = [compute_gumbel_noise(64, one) for one in specs]
    for i, first in enumerate(noises):
        for second in noises[:i]:
            assert np.abs(first - second).min() > 0


def test_noise_is_gumbel() -> None:
    noise = np.sort(compute_gumbel_noise(50_000, spec()).astype(np.float64))
    expected = np.exp(-np.exp(-noise))
    distance = np.abs(expected - np.arange(1, len(noise) + 1) / len(noise)).max()
    assert distance < 1.63 / math.sqrt(len(noise))  # Kolmogorov and Smirnov, 1%


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (DRAWN, 12),
        (replace(DRAWN, temperature=2.5), 12),
        (replace(DRAWN, top_k=5), 5),
        (replace(DRAWN, temperature=3.0, top_p=0.8), None),
        (replace(DRAWN, temperature=3.0, top_k=9, top_p=0.7), None),
    ],
    ids=["plain", "hot", "top-k", "top-p", "both"],
)
def test_draws_follow_the_filtered_distribution(params: SamplingParams, kept: int | None) -> None:
    logits = logits_of(12)
    exact = np.exp(logits.astype(np.float64) / params.temperature)
    ranked = np.argsort(-exact)
    if params.top_k:
        exact[ranked[params.top_k :]] = 0.0
    exact /= exact.sum()
    before = np.cumsum(exact[ranked]) - exact[ranked]
    exact[ranked[before >= params.top_p]] = 0.0
    exact /= exact.sum()
    assert kept is None or (exact > 0).sum() == kept

    counts = np.bincount([draw_token(logits, spec(i, params)) for i in range(3000)], minlength=12)
    assert counts[exact == 0].sum() == 0
    possible = exact > 0
    # The 99.9% points of chi-square with 2 .. 11 degrees of freedom lie between 13.8 and 31.3.
    limit = {
        2: 13.8,
        3: 16.3,
        4: 18.5,
        5: 20.5,
        6: 22.5,
        7: 24.3,
        8: 26.1,
        9: 27.9,
        10: 29.6,
        11: 31.3,
    }
    assert chi_square(counts[possible], exact[possible]) < limit[int(possible.sum()) - 1]


def test_greedy_is_argmax_and_forbidden_ids_are_never_drawn() -> None:
    logits = torch.from_numpy(logits_of(50)).repeat(3, 1)
    best = int(logits[0].argmax())
    only = tuple(token for token in range(50) if token != 7)
    specs = [
        spec(params=GREEDY),
        spec(params=GREEDY, forbidden_token_ids=(best, 10**6)),
        spec(forbidden_token_ids=only),
    ]
    greedy, second, forced = (made.token_id for made in sample_tokens(logits.clone(), specs))
    assert greedy == best
    assert second == int(logits[0].topk(2).indices[1])
    assert forced == 7


@pytest.mark.parametrize(
    "params",
    [replace(DRAWN, top_k=1), replace(DRAWN, top_p=1e-6), replace(DRAWN, temperature=1e-30)],
    ids=["top-k 1", "tiny top-p", "tiny temperature"],
)
def test_narrowest_filters_are_greedy(params: SamplingParams) -> None:
    logits = logits_of(300)
    assert {draw_token(logits, spec(i, params)) for i in range(20)} == {int(logits.argmax())}


def test_ties_with_the_lowest_kept_score_are_kept() -> None:
    logits = np.zeros(8, dtype=np.float32)
    for params in (replace(DRAWN, top_k=3), replace(DRAWN, top_p=0.3)):
        assert {draw_token(logits, spec(i, params)) for i in range(200)} == set(range(8))


def test_a_sequence_draws_the_same_in_any_batch() -> None:
    rows = torch.stack([torch.from_numpy(logits_of(1000, seed)) for seed in range(6)])
    specs = [
        spec(3),
        spec(3, replace(DRAWN, seed=9, top_p=0.9)),
        spec(4, GREEDY),
        spec(5, replace(DRAWN, top_k=40)),
        spec(3, choice_index=1),
        spec(9, forbidden_token_ids=(1, 2)),
    ]
    together = sample_tokens(rows.clone(), specs)
    backwards = sample_tokens(rows.flip(0).clone(), specs[::-1])[::-1]
    alone = [sample_tokens(rows[i : i + 1].clone(), specs[i : i + 1])[0] for i in range(6)]
    assert together == backwards == alone


@pytest.mark.parametrize("params", [DRAWN, GREEDY], ids=["drawn", "greedy"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_damaged_logits_are_an_error(params: SamplingParams, bad: float) -> None:
    logits = torch.zeros(2, 30)
    logits[1, 4] = bad
    with pytest.raises(NodeFailed, match="not finite"):
        sample_tokens(logits, [spec(params=params)] * 2)
