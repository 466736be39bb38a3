from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.core.leases import Leases

_STEP = st.tuples(st.sampled_from(["set", "drop", "sweep"]), st.integers(0, 7), st.integers(0, 40))


@given(st.lists(_STEP, max_size=300))
def test_a_sweep_finds_every_expired_lease_and_no_other(steps: list[tuple[str, int, int]]) -> None:
    """Whatever the order of grants, renewals and ends; against a plain dictionary."""
    leases: Leases[int] = Leases()
    model: dict[int, float] = {}
    now = 0.0
    for action, key, amount in steps:
        match action:
            case "set":
                leases.set(key, now + amount)
                model[key] = now + amount
            case "drop":
                leases.drop(key)
                model.pop(key, None)
            case "sweep":
                now += amount
                over = {held for held, deadline in model.items() if deadline <= now}
                assert sorted(leases.expire(now)) == sorted(over)
                for held in over:
                    del model[held]
        assert leases.next_deadline() == min(model.values(), default=None)
        assert len(leases) == len(model)
        assert all(held in leases for held in model)


def test_a_lease_that_is_renewed_for_ever_hides_nobody() -> None:
    leases: Leases[str] = Leases()
    leases.set("alive", 1.0)
    leases.set("forgotten", 1.5)
    for tick in range(1, 2000):
        leases.set("alive", tick + 1.0)
    assert leases.expire(1.5) == ["forgotten"]
    assert len(leases._heap) < 200  # renewals do not pile up
