"""How many threads a node computes with."""

from pathlib import Path

import pytest

from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.process.cores import has_core_quota
from node_engine.host import engine_factory
from node_engine.host.engine_factory import count_compute_threads


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_factory, "count_usable_cores", lambda: 8)


@pytest.mark.parametrize(
    ("threads", "nodes", "shares_cores", "expected"),
    [
        ("auto", 1, True, 8),
        ("auto", 3, True, 8),
        ("auto", 1, False, 8),
        ("auto", 3, False, 2),
        ("auto", 9, False, 1),
        ("5", 3, True, 5),
        ("5", 3, False, 5),
    ],
)
def test_threads(threads: str, nodes: int, shares_cores: bool, expected: int) -> None:
    config = NodeConfig(threads=threads, nodes_per_host=nodes)
    assert count_compute_threads(config, shares_cores=shares_cores) == expected


@pytest.mark.parametrize(
    "threads", ["0", "-1", "many", "", "²", "٣", "4097", "4294967297", "9" * 5000]
)
def test_threads_that_are_no_number_are_refused(threads: str) -> None:
    with pytest.raises(ConfigError, match=f"threads is '{threads}': .* number from 1 to 4096"):
        count_compute_threads(NodeConfig(threads=threads), shares_cores=True)


def test_quota_of_a_container(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    assert not has_core_quota(quota)
    quota.write_text("max 100000")
    assert not has_core_quota(quota)
    quota.write_text("200000 100000")
    assert has_core_quota(quota)
