from pathlib import Path

import pytest

from baton.cli.default_model import default_model
from baton.errors import ConfigError

BUILDER = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
folder.mkdir(parents=True)
(folder / "config.json").write_text("{}")
"""


def checkout(root: Path, builder: str) -> None:
    (root / "pyproject.toml").touch()
    (root / "tools").mkdir()
    (root / "tools" / "__init__.py").touch()
    (root / "tools" / "build_demo_model.py").write_text(builder)


def test_the_bundled_model_comes_first(tmp_path: Path) -> None:
    checkout(tmp_path, BUILDER)
    bundled = tmp_path / "models" / "demo"
    bundled.mkdir(parents=True)
    (bundled / "config.json").touch()
    told: list[str] = []
    assert default_model(told.append, tmp_path) == bundled
    assert told == []


def test_a_random_one_is_built_once_and_called_so(tmp_path: Path) -> None:
    checkout(tmp_path, BUILDER)
    told: list[str] = []
    assert default_model(told.append, tmp_path) == tmp_path / ".demo" / "demo"
    (tmp_path / "tools" / "build_demo_model.py").write_text("raise SystemExit('built twice')")
    assert default_model(told.append, tmp_path) == tmp_path / ".demo" / "demo"
    assert len(told) == 2
    assert all("random" in line and "mean nothing" in line for line in told)


def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    checkout(tmp_path, "raise SystemExit('no space left')")
    with pytest.raises(ConfigError, match="no space left"):
        default_model(lambda _: None, tmp_path)


def test_without_the_tool_a_model_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model"):
        default_model(lambda _: None, tmp_path)
