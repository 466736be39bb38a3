"""How long a node waits before it dials its pool again."""

from kv_pool.core.redial import Redial


def test_who_is_refused_asks_less_and_less_often() -> None:
    redial = Redial(0.2, 1.0)
    assert [redial.refused() for _ in range(5)] == [0.2, 0.4, 0.8, 1.0, 1.0]


def test_a_pool_that_is_gone_is_dialled_soon_whatever_was_before() -> None:
    redial = Redial(0.2, 1.0)
    assert [redial.refused(), redial.refused(), redial.gone(), redial.gone()] == [0.2, 0.4, 0.2, 0.2]
    assert redial.refused() == 0.8, "the same one is back"
    redial.attached()
    assert redial.refused() == 0.2
