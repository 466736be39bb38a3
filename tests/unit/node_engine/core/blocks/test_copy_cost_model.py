from node_engine.core.blocks.copy_cost_model import CopyCostModel


def test_copy_is_worthwhile_before_any_observation() -> None:
    assert CopyCostModel(1e-3).is_copy_worthwhile(1)


def test_a_copy_pays_if_computing_takes_longer() -> None:
    worth = CopyCostModel(1e-3)
    worth.observe_prefill(tokens=100, seconds=0.03)  # 0.3 ms each
    assert not worth.is_copy_worthwhile(3)
    assert worth.is_copy_worthwhile(4)


def test_seconds_per_token_follows_recent_steps() -> None:
    worth = CopyCostModel(1e-3)
    worth.observe_prefill(tokens=100, seconds=0.03)
    for _ in range(100):
        worth.observe_prefill(tokens=100, seconds=0.3)
    assert worth.is_copy_worthwhile(1)
