"""Flag over environment over file over default; every mistake names the field and where it came
from."""

import dataclasses
from pathlib import Path

import pytest

from baton.config.resolve import (
    find_unknown_variables,
    get_field_choices,
    get_field_help,
    parse_assignment,
    resolve_config,
)
from baton.config.settings import FIELD_NAMES, SECRET_FIELDS, Config
from baton.errors import ConfigError


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("port = 1\ngrpc_port = 2\nadmin_port = 3\n")
    environ = {
        "BATON_GRPC_PORT": "20",
        "BATON_ADMIN_PORT": "30",
        "BATON_CONFIG": str(file),
        "BATON_UNRELATED": "x",
    }
    config = resolve_config({"admin_port": "300"}, environ=environ)
    assert (config.port, config.grpc_port, config.admin_port) == (1, 20, 300)
    assert config.block_size == 16


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        ({"port": "70000"}, {}, ["port", "70000", "65535", "command line"]),
        ({"mode": "sideways"}, {}, ["mode", "sideways", "disaggregated, colocated, auto"]),
        (
            {"dtype": "float16"},
            {},
            ["dtype", "float16", "one of auto, float32, bfloat16", "command line"],
        ),
        ({"heartbeat": "0"}, {}, ["heartbeat"]),
        (
            {"liveness_timeout": "4.9"},
            {},
            ["liveness_timeout", "4.9", ">= 5.0"],
        ),  # signs of life come every second
        ({"heartbeat": "inf"}, {}, ["heartbeat", "inf"]),
        ({"request_timeout": "nan"}, {}, ["request_timeout", "nan"]),
        ({"no_such": "1"}, {}, ["no_such"]),
        ({}, {"BATON_BLOCK_SIZE": "many"}, ["block_size", "many", "environment"]),
        ({}, {"BATON_CONFIG": "/nowhere.toml"}, ["/nowhere.toml"]),
        ({"api_key": "@/nowhere"}, {}, ["api_key", "/nowhere"]),
    ],
)
def test_mistakes_are_named(
    flags: dict[str, object], environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(flags, environ=environ)
    for word in words:
        assert word in str(caught.value)


def test_secret_from_file_and_never_in_an_error(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("s3cret\n")
    assert resolve_config({"api_key": f"@{file}"}, environ={}).api_key == "s3cret"
    with pytest.raises(ConfigError) as caught:
        resolve_config({"api_key": ["s3cret"]}, environ={})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "error_text"), [(b"", "empty"), (b" \n", "empty"), (b"\xff", "UTF-8")]
)
def test_empty_or_unreadable_secret_file_is_an_error(
    content: bytes, error_text: str, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=error_text) as caught:
        resolve_config({"api_key": f"@{file}"}, environ={})
    assert caught.value.param == "api_key"


@pytest.mark.parametrize("field", ["api_key", "admin_token"])
@pytest.mark.parametrize("secret", ["clé", "a\nb", "\x7f"])
def test_secret_that_no_header_holds_is_an_error(field: str, secret: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII") as caught:
        resolve_config({field: secret}, environ={})
    assert caught.value.param == field
    assert secret not in caught.value.message


@pytest.mark.parametrize("content", [b"port = = 1", b'model = "\xff"'])
def test_bad_toml(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "baton.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="not TOML"):
        resolve_config({}, environ={}, file=str(file))


def test_assignment() -> None:
    assert parse_assignment("max-model-len=7") == ("max_model_len", "7")
    with pytest.raises(ConfigError):
        parse_assignment("max-model-len")


def test_field_help_and_choices() -> None:
    assert get_field_choices("mode") == ("disaggregated", "colocated", "auto")
    assert get_field_choices("port") == ()
    assert "Tokens of a KV block" in get_field_help("block_size")
    assert set(FIELD_NAMES) >= SECRET_FIELDS
    with pytest.raises(AttributeError):
        Config().port = 1  # type: ignore[misc]
    assert dataclasses.asdict(Config())["mode"] == "disaggregated"


def test_every_choice_names_its_values() -> None:
    chosen = [field for field in FIELD_NAMES if get_field_choices(field)]
    assert len(chosen) > 5
    for field in chosen:
        with pytest.raises(ConfigError) as caught:
            resolve_config({}, environ={f"BATON_{field.upper()}": "no-such-word"})
        assert f"it must be one of {', '.join(get_field_choices(field))}" in str(caught.value)


def test_unknown_variable_notice_suggests_the_nearest_name() -> None:
    environ = {
        "BATON_PREFIL": "2",
        "BATON_SERVICE_HOST": "10.0.0.1",
        "BATON_PORT": "1",
        "BATON_ENDPOINT": "x",
        "A": "b",
    }
    near, far = find_unknown_variables(environ)
    assert (
        near == "BATON_PREFIL is set, and no setting is called so: it has no effect: "
        "did you mean BATON_PREFILL?"
    )
    assert far == "BATON_SERVICE_HOST is set, and no setting is called so: it has no effect"
