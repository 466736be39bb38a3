"""How long a node waits before it dials its pool again."""

from kv_pool.core.client.redial_backoff import RedialBackoff


def test_delay_doubles_after_each_refusal() -> None:
    redial = RedialBackoff(0.2, 1.0)
    assert [redial.delay_after_refusal() for _ in range(5)] == [0.2, 0.4, 0.8, 1.0, 1.0]


def test_delay_after_disconnect_is_always_short() -> None:
    redial = RedialBackoff(0.2, 1.0)
    assert [
        redial.delay_after_refusal(),
        redial.delay_after_refusal(),
        redial.delay_after_disconnect(),
        redial.delay_after_disconnect(),
    ] == [0.2, 0.4, 0.2, 0.2]
    assert redial.delay_after_refusal() == 0.8, "the same one is back"
    redial.reset()
    assert redial.delay_after_refusal() == 0.2
