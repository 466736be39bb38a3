from node_engine.core.copy_worth import CopyWorth


def test_until_something_is_known_a_copy_is_worth_it() -> None:
    assert CopyWorth(1e-3).pays(1)


def test_a_copy_pays_if_computing_takes_longer() -> None:
    worth = CopyWorth(1e-3)
    worth.computed(tokens=100, seconds=0.03)  # 0.3 ms each
    assert not worth.pays(3)
    assert worth.pays(4)


def test_rates_follow_the_machine() -> None:
    worth = CopyWorth(1e-3)
    worth.computed(tokens=100, seconds=0.03)
    for _ in range(100):
        worth.computed(tokens=100, seconds=0.3)
    assert worth.pays(1)
