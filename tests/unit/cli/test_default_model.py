from pathlib import Path

import pytest

from baton.cli.default_model import default_model
from baton.errors import ConfigError


def test_it_is_the_one_of_the_source_tree() -> None:
    assert default_model() == Path(__file__).resolve().parents[3] / "models" / "demo"


def test_without_one_a_model_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model") as error:
        default_model(tmp_path)
    assert str(tmp_path) in str(error.value)
