"""What a coordinator knows of the model that it serves, by its settings."""

from pathlib import Path

import pytest

from baton.config import Config
from baton.model_files import read_model_files
from coordinator.assemble import served_model
from coordinator.core.identity import CoordinatorModel


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ({"engine": "paced", "model": ""}, "paced"),
        ({"engine": "model", "model": "org/name"}, "model"),
        ({"engine": "model", "model": ""}, ""),
    ],
)
def test_without_a_folder_the_engine_is_known_and_no_file(settings: dict[str, str], engine: str) -> None:
    assert served_model(Config(**settings)) == CoordinatorModel(engine)  # type: ignore[arg-type]


def test_the_files_of_a_folder_are_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    known = served_model(Config(engine="model", model=str(tmp_path)))
    assert known == CoordinatorModel("model", read_model_files(tmp_path))
    assert known.files.config
