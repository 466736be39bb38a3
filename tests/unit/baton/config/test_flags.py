"""Flags are made from the settings table and leave no trace unless typed."""

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from baton.config import flags as config_flags
from baton.config.common import ProcessConfig
from baton.config.coordinator_config import CoordinatorConfig
from baton.config.node_config import NodeConfig
from baton.config.pool_config import PoolConfig
from baton.config.resolve import resolve_config
from baton.config.settings import FIELD_NAMES, Config
from baton.errors import ConfigError
from coordinator.node_links.dispatcher import Dispatcher

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in FIELD_NAMES:
        monkeypatch.delenv(f"BATON_{field.upper()}", raising=False)


def parse(*argv: str, fields: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    config_flags.add_config_flags(parser, fields)
    return parser.parse_args(argv)


def load(*argv: str) -> Config:
    return config_flags.load_config(argv, Config, prog="baton", description="")


def test_every_setting_has_a_flag() -> None:
    text = argparse.ArgumentParser(allow_abbrev=False)
    config_flags.add_config_flags(text)
    shown = text.format_help()
    for field in FIELD_NAMES:
        assert f"--{field.replace('_', '-')}" in shown


READERS = {
    "coordinator": (CoordinatorConfig, ("coordinator",)),
    "node": (NodeConfig, ("prefill_node", "decode_node", "node_engine", "kv_transfer")),
}


@pytest.mark.parametrize("process", READERS)
def test_every_setting_that_a_process_reads_is_a_flag_of_it(process: str) -> None:
    config_class, folders = READERS[process]
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    read = {
        name
        for path in files
        for name in re.findall(r"\b_?(?:config|settings)\.([a-z_]+)", path.read_text())
    }
    assert read & set(FIELD_NAMES) <= {field.name for field in dataclasses.fields(config_class)}


@pytest.mark.parametrize("config_class", [CoordinatorConfig, NodeConfig, PoolConfig])
def test_a_process_takes_its_own_settings_from_those_of_the_cluster(
    config_class: type[ProcessConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_SILENCE", "7")
    monkeypatch.setenv("BATON_LIVENESS_TIMEOUT", "9")
    config = config_flags.load_config([], config_class, prog="baton", description="")
    assert type(config) is config_class
    assert config.silence == 7.0
    assert not hasattr(config, "liveness_timeout")


def test_no_flags_give_no_settings() -> None:
    assert config_flags.get_typed_settings(parse()) == {}


def test_help_shows_default_and_choices() -> None:
    parser = argparse.ArgumentParser(prog="x")
    config_flags.add_config_flags(parser, ["port", "device", "api_key"])
    shown = " ".join(parser.format_help().split())
    assert "HTTP port; 0 picks a free one (default 8000)" in shown
    assert "{auto,cpu,cuda}" in shown
    assert "--model" not in shown


def test_flag_values_are_converted() -> None:
    settings = load("--port", "0", "--request-timeout=1.5", "--insecure", "--dtype", "bfloat16")
    assert (settings.port, settings.request_timeout, settings.insecure) == (0, 1.5, True)
    assert settings.dtype == "bfloat16"
    assert load("--no-insecure").insecure is False


@pytest.mark.parametrize(
    ("argv", "error_text"),
    [
        (["--port", "70000"], "port is '70000'"),
        (["--port", "many"], "port is 'many'"),
        (["--set", "port"], "not KEY=VALUE"),
        (["--set", "colour=red"], "no setting 'colour'"),
        (["--set", "port=1", "--port", "2"], "port is given as '2' and as '1'"),
        (["--set", "request_timeout=0"], "request_timeout is '0'"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
    ],
)
def test_bad_values_name_the_setting(argv: list[str], error_text: str) -> None:
    with pytest.raises(ConfigError, match=error_text):
        load(*argv)


def test_a_contradicted_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load("--set", "api_key=alpha", "--api-key", "beta")
    assert "alpha" not in str(caught.value)
    assert "beta" not in str(caught.value)


@pytest.mark.parametrize("argv", [["--device", "tpu"], ["--prt", "1"], ["--por", "1"]])
def test_unknown_flags_and_words_exit_with_two(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load(*argv)
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_flag_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("port = 1\ngrpc_port = 2\nadmin_port = 3\n")
    monkeypatch.setenv("BATON_PORT", "11")
    monkeypatch.setenv("BATON_GRPC_PORT", "12")
    settings = load("--config", str(file), "--port", "21")
    assert (settings.port, settings.grpc_port, settings.admin_port) == (21, 12, 3)
    assert settings.cluster_port == 0


def test_set_reaches_settings_without_a_flag_here() -> None:
    namespace = parse("--set", "block-size=32", fields=["port"])
    assert resolve_config(config_flags.get_typed_settings(namespace)).block_size == 32


def test_invalid_slo_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=r"--slo: 'soon' is not ttft=TIME"):
        Dispatcher(Config(slo="soon"))
