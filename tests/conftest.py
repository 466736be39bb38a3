"""Options of the test suite, and what holds for all of it."""

import gc
import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported: two threads each would wait for one another

import pytest
import structlog
from hypothesis import HealthCheck, settings

# How fast examples are drawn and run says something about the machine, and nothing about what is
# tested.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples in every run. Others: pytest --hypothesis-profile=random
settings.register_profile("seeded", settings.get_profile("random"), derandomize=True)
settings.load_profile("seeded")


_HERE = Path(__file__).parent
_LOG_FILE = open(2, "w", closefd=False)
# Files go whole to the processes of a parallel run, in this order and within a folder the slow ones
# first, so that all end together.
_FOLDERS = (
    "parity",
    "chaos",
    "integration",
    "structured",
    "soak",
    "abuse",
    "faults",
    "pool",
    "contract",
    "unit",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--chaos-rounds", type=int, default=6, help="Rounds of random faults")
    group.addoption(
        "--chaos-seed", type=int, default=1, help="Seed of the first round; the others follow it"
    )
    group.addoption(
        "--every-fault", action="store_true", help="Play also what is marked as thorough"
    )
    group.addoption("--chaos-stage", default="", help="Play every round on this stage")
    structured = parser.getgroup("structured output")
    structured.addoption(
        "--structured-generations", type=int, default=24, help="Outputs under public schemas"
    )
    soak = parser.getgroup("soak")
    soak.addoption("--soak-seconds", type=float, default=4.0, help="How long the mixed load runs")
    soak.addoption("--soak-seed", type=int, default=1, help="Seed of what is asked")
    soak.addoption(
        "--storm-seconds",
        type=float,
        default=2.0,
        help="How long each overload lasts; 30 or more are judged",
    )
    soak.addoption(
        "--abuse-seconds",
        type=float,
        default=1.0,
        help="How long each attack lasts; from 20 on time is judged",
    )
    soak.addoption(
        "--pool-operations", type=int, default=400, help="What the users of the soaked pool do"
    )
    soak.addoption("--kills", type=int, default=2, help="How often each class of process is killed")
    soak.addoption("--batch-kills", type=int, default=2, help="How often a batch is killed")
    soak.addoption("--fuzz-cases", type=int, default=150, help="How many odd requests are sent")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.endswith("_simulated"):
            item.add_marker(pytest.mark.slow)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (_run_order(item), item.path not in slow))
    if config.getoption("--every-fault"):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The modules of libraries and tests stay: the garbage collector never visits them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    _reset_logging()
    if not hasattr(config, "workerinput"):  # xdist workers inherit the folder
        cache = tempfile.TemporaryDirectory(prefix="baton-tests-", ignore_cleanup_errors=True)
        config.add_cleanup(cache.cleanup)
        # Keeps packed weights of test models out of the user's ~/.cache/baton.
        os.environ["XDG_CACHE_HOME"] = cache.name


def pytest_runtest_teardown() -> None:
    """A node that ran inside a test leaves none of its logging to the next one."""
    _reset_logging()


def pytest_unconfigure() -> None:
    """A command line called in a test leaves Typer's hook behind, which complains when the process
    ends."""
    sys.excepthook = sys.__excepthook__


def _reset_logging() -> None:
    """Let structlog print to standard error through a text file of its own.

    Its default is `print` without a file. Where pytest replaces `sys.stdout` while a thread of a
    server prints like that, CPython may use the freed file: a segmentation fault.
    """
    structlog.reset_defaults()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(_LOG_FILE))


def _run_order(item: pytest.Item) -> int:
    folder = item.path.relative_to(_HERE).parts[0]
    return _FOLDERS.index(folder) if folder in _FOLDERS else len(_FOLDERS)
