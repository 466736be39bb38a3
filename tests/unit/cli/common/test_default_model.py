from pathlib import Path

import pytest

from baton.cli.common.default_model import find_default_model
from baton.errors import ConfigError


def test_default_model_is_in_the_source_tree() -> None:
    assert find_default_model() == Path(__file__).resolve().parents[4] / "models" / "demo"


def test_missing_default_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model") as error:
        find_default_model(tmp_path)
    assert str(tmp_path) in str(error.value)
