"""A model reads blocks of the shared pool where they are, or from copies of its own: the tokens are
transformers'."""

from pathlib import Path

import pytest

from tests.models import build_model, find_stable_prompts
from tests.pool.model_node import check_reads


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])
def test_tokens_are_those_of_transformers(tmp_path: Path, in_place: bool) -> None:
    folder = build_model("llama", tmp_path)
    (wanted,) = find_stable_prompts(folder, (80,), 12)
    check_reads(folder, tmp_path, "cpu", wanted.prompt, wanted.reference_tokens, in_place=in_place)
