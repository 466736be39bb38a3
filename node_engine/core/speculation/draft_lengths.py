"""How many draft tokens of each sequence a step verifies: those that make it the most productive.

A step without drafts gives each of its S sequences one token in P seconds. With n drafts it takes
V(n) seconds, and gives E more tokens: the j-th draft of a sequence is kept if it and all before it
are right, with probability a**j. The drafts with the greatest probabilities are taken, as many as
give the most tokens a second, (S + E) / V(n), and none if that is not more than S / P. For one
sequence and V(n) = P (1 + n c) the speed-up is that of Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding" (2023):

    (1 - a**(k + 1)) / ((1 - a) (1 + k c))

A full batch is bound by arithmetic, so that each draft costs nearly as much as a sequence does, and
the rule takes none.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

MIN_GAIN = 1.02  # of tokens a second; a smaller one may be an error of the estimates


class DraftOffer(NamedTuple):
    """The draft of one sequence."""

    num_tokens: int
    acceptance_rate: float  # of each token, if those before it are right


def choose_draft_lengths(
    offers: Sequence[DraftOffer],
    *,
    num_sequences: int,
    max_tokens: int,
    plain_seconds: float,
    verification_seconds: Callable[[int, int], float],
    min_gain: float = MIN_GAIN,
) -> list[int]:
    """How many tokens of each offer to verify, together at most `max_tokens`.

    `num_sequences` take part in the step, with an offer or without. It takes `plain_seconds`
    without drafts, and `verification_seconds(n, k)` with n draft tokens in all, at most k of one
    sequence.
    """
    ranked = sorted(_iter_gains(offers), reverse=True)[:max_tokens]
    best_rate = min_gain * num_sequences / max(plain_seconds, 1e-9)
    best_count, gained, longest = 0, 0.0, 0
    counts = [0] * len(offers)
    for count, (gain, place) in enumerate(ranked, 1):
        gained += gain
        counts[-place] += 1
        longest = max(longest, counts[-place])
        rate = (num_sequences + gained) / max(verification_seconds(count, longest), 1e-9)
        if rate > best_rate:
            best_rate, best_count = rate, count
    lengths = [0] * len(offers)
    for _, place in ranked[:best_count]:
        lengths[-place] += 1
    return lengths


def compute_speedup(acceptance_rate: float, num_drafts: float, relative_cost: float) -> float:
    """The speed-up by the formula of the module, for one sequence.

    `relative_cost` is c: what a draft token adds to a step, as a share of a step without drafts.
    """
    a, k = min(acceptance_rate, 1.0), num_drafts
    tokens = k + 1 if a == 1.0 else (1 - a ** (k + 1)) / (1 - a)
    return tokens / (1 + k * relative_cost)


def _iter_gains(offers: Sequence[DraftOffer]) -> list[tuple[float, int]]:
    """The probability of each draft token to be kept, with minus the place of its offer.

    Within an offer the probabilities never grow, so that a sorted list takes them in order.
    """
    return [
        (offer.acceptance_rate**number, -place)
        for place, offer in enumerate(offers)
        for number in range(1, offer.num_tokens + 1)
    ]
