"""Timers: one time for each key, which fires once."""

from hypothesis import given
from hypothesis import strategies as st

from baton.types import RequestId
from coordinator.core.common.effects import RequestTimers


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.integers(0, 9)))),
    st.integers(0, 9),
)
def test_timers_fire_once_and_in_order(orders: list[tuple[str, int | None]], now: int) -> None:
    timers, model = RequestTimers(), dict[RequestId, float]()
    for name, when in orders:
        request = RequestId(name)
        if when is None:
            timers.cancel_timer(request)
            model.pop(request, None)
        else:
            timers.set_timer(request, float(when))
            model[request] = float(when)
    assert timers.next_timer_at() == min(model.values(), default=None)
    rang = timers.pop_due(float(now))
    assert sorted(rang) == sorted(name for name, when in model.items() if when <= now)
    assert [model[name] for name in rang] == sorted(model[name] for name in rang)
    assert timers.pop_due(float(now)) == []


def test_resetting_timers_does_not_leak() -> None:
    timers = RequestTimers()
    for when in range(10_000):
        timers.set_timer(RequestId("a"), float(when))
    assert len(timers._heap) < 2_000
    assert timers.pop_due(10_000.0) == [RequestId("a")]
