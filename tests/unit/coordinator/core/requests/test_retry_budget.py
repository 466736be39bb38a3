"""The retry budget against a model that keeps the whole history."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.admission.admission_controller import (
    _BUCKET_SECONDS,
    MIN_RETRIES,
    RETRY_WINDOW_SECONDS,
    RetryBudget,
)

SHARE = 0.2


def test_min_retries_are_available_without_load() -> None:
    budget = RetryBudget(SHARE)
    budget.record_request(0.0)
    assert [budget.try_spend(1.0) for _ in range(MIN_RETRIES + 2)] == [True] * MIN_RETRIES + [
        False
    ] * 2
    assert budget.next_expiry_at() == 1.0 + RETRY_WINDOW_SECONDS
    assert not budget.try_spend(0.99 + RETRY_WINDOW_SECONDS)
    assert budget.try_spend(1.0 + RETRY_WINDOW_SECONDS)


def test_budget_is_share_of_offered_requests() -> None:
    budget = RetryBudget(SHARE)
    for number in range(1000):
        budget.record_request(number / 200)
    assert sum(budget.try_spend(5.0) for _ in range(1000)) == 200
    assert budget.available_retries(5.0) == 0
    for _ in range(50):
        budget.record_request(5.0)
    assert budget.available_retries(5.0) == int(SHARE * 1050) - 200


steps = st.lists(
    st.tuples(
        st.sampled_from(["offered", "take", "many offered", "many takes"]), st.floats(0.0, 3.0)
    ),
    max_size=60,
)


@given(steps)
def test_budget_is_exactly_the_share(script: list[tuple[str, float]]) -> None:
    budget, now = RetryBudget(SHARE), 0.0
    offered: list[float] = []
    retried: list[float] = []
    for kind, pause in script:
        now += pause
        for _ in range(40 if kind.startswith("many") else 1):
            if "offered" in kind:
                budget.record_request(now)
                offered.append(now)
                continue
            recent = sum(at + RETRY_WINDOW_SECONDS > now for at in retried)
            least = sum(at + RETRY_WINDOW_SECONDS - _BUCKET_SECONDS > now for at in offered)
            most = sum(at + RETRY_WINDOW_SECONDS > now for at in offered)
            allowed = budget.try_spend(now)
            assert not allowed or recent < max(MIN_RETRIES, SHARE * most)
            assert allowed or recent >= max(MIN_RETRIES, int(SHARE * least))
            retried += [now] * allowed
    assert budget.available_retries(now + 2 * RETRY_WINDOW_SECONDS) == MIN_RETRIES, (
        "what is long ago counts no more"
    )
