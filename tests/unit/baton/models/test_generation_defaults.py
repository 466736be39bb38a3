"""generation_config.json as the coordinator and the nodes read it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.models.generation_defaults import (
    GenerationDefaults,
    load_generation_defaults,
    parse_generation_defaults,
)

ROOT = Path(__file__).resolve().parents[4]


def test_a_folder_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path) == GenerationDefaults()


def test_every_field_is_read_and_others_are_ignored(tmp_path: Path) -> None:
    content = {
        "eos_token_id": [2, 7, 2],
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0,
        "repetition_penalty": 1.05,
        "max_new_tokens": 512,
        "num_beams": "four",
        "transformers_version": "5.0.0",
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert load_generation_defaults(tmp_path) == GenerationDefaults(
        (2, 7), 0.6, 20, 0.95, 0.0, 1.05, 512
    )


@pytest.mark.parametrize(
    ("raw", "temperature"),
    [
        ({}, None),
        ({"do_sample": None}, None),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0}, 0.0),
        ({"do_sample": True}, None),
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
    ],
    ids=str,
)
def test_do_sample_false_is_greedy(raw: dict[str, Any], temperature: float | None) -> None:
    assert parse_generation_defaults(raw).temperature == temperature


def test_null_says_nothing() -> None:
    fields = (
        "eos_token_id",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "max_new_tokens",
    )
    assert parse_generation_defaults(dict.fromkeys(fields)) == GenerationDefaults()


REFUSED: list[tuple[str, Any, str]] = [
    ("do_sample", "no", "true or false"),
    ("do_sample", 0, "true or false"),
    ("temperature", -0.1, "of at least 0 and at most 2"),
    ("temperature", 2.5, "at most 2"),
    ("temperature", "hot", "a number"),
    ("temperature", float("nan"), "a number"),
    ("top_k", -1, "at least 0"),
    ("top_k", 5.0, "an integer"),
    ("top_k", True, "an integer"),
    ("top_p", 0, "above 0 and at most 1"),
    ("top_p", 1.01, "at most 1"),
    ("top_p", [0.9], "a number"),
    ("min_p", -0.5, "at least 0"),
    ("min_p", 2, "at most 1"),
    ("repetition_penalty", 0.0, "at least 0.01"),
    ("repetition_penalty", float("inf"), "at least 0.01 and at most 100"),
    ("repetition_penalty", 10**400, "at most 100"),
    ("max_new_tokens", 0, "at least 1"),
    ("max_new_tokens", "10", "an integer"),
    ("eos_token_id", "</s>", "a token id"),
    ("eos_token_id", [2, -1], "a token id"),
    ("eos_token_id", [[2]], "a token id"),
    ("eos_token_id", True, "a token id"),
]


@pytest.mark.parametrize(
    ("field", "value", "requirement"),
    REFUSED,
    ids=[f"{field}={value}" for field, value, _ in REFUSED],
)
def test_a_bad_value_is_one_line_that_names_it(field: str, value: Any, requirement: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_generation_defaults({field: value})
    message = refused.value.message
    assert all(
        part in message for part in (field, repr(value), "generation_config.json", requirement)
    ), message
    assert "\n" not in message


@pytest.mark.parametrize("content", ["{", "[]", "\xff"], ids=["broken", "no object", "no UTF-8"])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load_generation_defaults(tmp_path)


def test_reading_it_needs_no_torch() -> None:
    code = (
        "import sys, baton.models.generation_defaults; "
        "sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
