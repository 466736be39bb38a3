"""Options of the test suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--chaos-rounds", type=int, default=10, help="Rounds of random faults")
    group.addoption("--chaos-seed", type=int, default=1, help="Seed of the first round; the others follow it")
    group.addoption("--every-fault", action="store_true", help="Play also what is marked as thorough")
    group.addoption("--chaos-stage", default="", help="Play every round on this stage")
    soak = parser.getgroup("soak")
    soak.addoption("--soak-seconds", type=float, default=4.0, help="How long the mixed load runs")
    soak.addoption("--soak-seed", type=int, default=1, help="Seed of what is asked")
    soak.addoption(
        "--storm-seconds", type=float, default=2.0, help="How long each overload lasts; 30 or more are judged"
    )
    soak.addoption("--pool-operations", type=int, default=400, help="What the users of the soaked pool do")
    soak.addoption("--kills", type=int, default=2, help="How often each class of process is killed")
    soak.addoption("--fuzz-cases", type=int, default=150, help="How many odd requests are sent")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--every-fault"):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
