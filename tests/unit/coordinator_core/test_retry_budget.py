"""The retry budget against the whole history, whatever comes when."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.retry_budget import _GRAIN, FLOOR, WINDOW, RetryBudget

SHARE = 0.2


def test_the_floor_is_there_for_who_is_alone() -> None:
    budget = RetryBudget(SHARE)
    budget.offered(0.0)
    assert [budget.take(1.0) for _ in range(FLOOR + 2)] == [True] * FLOOR + [False] * 2
    assert budget.next() == 1.0 + WINDOW
    assert not budget.take(0.99 + WINDOW)
    assert budget.take(1.0 + WINDOW)


def test_a_share_of_what_comes_in() -> None:
    budget = RetryBudget(SHARE)
    for number in range(1000):
        budget.offered(number / 200)
    assert sum(budget.take(5.0) for _ in range(1000)) == 200
    assert budget.left(5.0) == 0
    for _ in range(50):
        budget.offered(5.0)
    assert budget.left(5.0) == int(SHARE * 1050) - 200


steps = st.lists(
    st.tuples(st.sampled_from(["offered", "take", "many offered", "many takes"]), st.floats(0.0, 3.0)), max_size=60
)


@given(steps)
def test_never_more_than_the_share_and_never_less(script: list[tuple[str, float]]) -> None:
    budget, now = RetryBudget(SHARE), 0.0
    offered: list[float] = []
    retried: list[float] = []
    for kind, pause in script:
        now += pause
        for _ in range(40 if kind.startswith("many") else 1):
            if "offered" in kind:
                budget.offered(now)
                offered.append(now)
                continue
            recent = sum(at + WINDOW > now for at in retried)
            least = sum(at + WINDOW - _GRAIN > now for at in offered)
            most = sum(at + WINDOW > now for at in offered)
            allowed = budget.take(now)
            assert not allowed or recent < max(FLOOR, SHARE * most)
            assert allowed or recent >= max(FLOOR, int(SHARE * least))
            retried += [now] * allowed
    assert budget.left(now + 2 * WINDOW) == FLOOR, "what is long ago counts no more"
