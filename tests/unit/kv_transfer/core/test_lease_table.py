"""LeaseTable, compared with a dictionary of deadlines."""

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.core.lease_table import LeaseTable

_STEP = st.tuples(st.sampled_from(["set", "drop", "sweep"]), st.integers(0, 7), st.integers(0, 40))


@given(st.lists(_STEP, max_size=300))
def test_pop_expired_returns_exactly_the_expired_leases(steps: list[tuple[str, int, int]]) -> None:
    """In any order of grants, renewals and removals, compared with a dictionary."""
    leases: LeaseTable[int] = LeaseTable()
    model: dict[int, float] = {}
    now = 0.0
    for action, key, amount in steps:
        match action:
            case "set":
                leases.set_deadline(key, now + amount)
                model[key] = now + amount
            case "drop":
                leases.remove_lease(key)
                model.pop(key, None)
            case "sweep":
                now += amount
                expired = {lease for lease, deadline in model.items() if deadline <= now}
                assert sorted(leases.pop_expired(now)) == sorted(expired)
                for lease in expired:
                    del model[lease]
        assert leases.next_deadline() == min(model.values(), default=None)
        assert len(leases) == len(model)
        assert all(lease in leases for lease in model)


def test_endless_renewals_of_one_lease_do_not_hide_expired_ones() -> None:
    leases: LeaseTable[str] = LeaseTable()
    leases.set_deadline("alive", 1.0)
    leases.set_deadline("forgotten", 1.5)
    for tick in range(1, 2000):
        leases.set_deadline("alive", tick + 1.0)
    assert leases.pop_expired(1.5) == ["forgotten"]
    assert len(leases._heap) < 200  # renewals do not pile up
