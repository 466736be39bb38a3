from pathlib import Path

import pytest

from baton.cli.checks.weight_cache import check_weight_cache
from baton.config.settings import Config
from tests.unit.cli.findings import assert_finding


def test_models_of_the_folder_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.weights").write_bytes(bytes(3 << 20))
    (tmp_path / "notes.txt").write_bytes(bytes(3 << 20))
    config = Config(weight_cache_dir=str(tmp_path), weight_cache_size="1GiB")
    assert_finding(
        check_weight_cache(config), "ok", f"{tmp_path}: 1 models, 3MiB of at most 1.0GiB"
    )


def test_no_cache_is_fine() -> None:
    assert_finding(check_weight_cache(Config(weight_cache_dir="off")), "ok", "at each start")
    assert_finding(check_weight_cache(Config(engine="paced")), "ok", "--engine paced")


def test_an_unusable_folder_is_bad_if_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    named = check_weight_cache(Config(weight_cache_dir=str(blocked / "weights")))
    assert_finding(named, "bad", "Not a directory", "--weight-cache-dir")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert_finding(check_weight_cache(Config()), "warning", "Not a directory", "--weight-cache-dir")


def test_a_malformed_size_is_bad() -> None:
    found = check_weight_cache(Config(weight_cache_dir="/tmp", weight_cache_size="much"))
    assert_finding(found, "bad", "weight_cache_size", "--weight-cache-size")
