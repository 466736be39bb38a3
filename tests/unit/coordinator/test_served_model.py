"""What a coordinator knows of the model that it serves, by its settings."""

from pathlib import Path

import pytest

from baton.config.settings import Config
from baton.models.file_digests import compute_file_digests
from coordinator.assemble import read_served_model
from coordinator.core.membership.join_checks import ServedModel


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ({"engine": "paced", "model": ""}, "paced"),
        ({"engine": "model", "model": "org/name"}, "model"),
        ({"engine": "model", "model": ""}, ""),
    ],
)
def test_without_a_model_folder_only_the_engine_is_known(
    settings: dict[str, str], engine: str
) -> None:
    assert read_served_model(Config(**settings)) == ServedModel(engine)  # type: ignore[arg-type]


def test_files_of_a_model_folder_are_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    known = read_served_model(Config(engine="model", model=str(tmp_path)))
    assert known == ServedModel("model", compute_file_digests(tmp_path))
    assert known.files.config_digest
