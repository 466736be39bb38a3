"""`--help` says of every command, option and setting what it does."""

import argparse
import importlib

import pytest
import typer

from baton.cli.common.options import PANELS, PER_NODE_FIELDS
from baton.cli.main import app
from baton.config.resolve import get_field_help
from baton.config.settings import FIELD_NAMES
from benchmarks.__main__ import BENCHMARK_MODULES as BENCHMARKS
from benchmarks.__main__ import make_parser

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_commands_and_their_options(command: str) -> None:
    assert COMMANDS[command].help
    shown = [option for option in COMMANDS[command].params if not getattr(option, "hidden", False)]
    assert [option.name for option in shown if not getattr(option, "help", None)] == []


def test_settings_of_every_process() -> None:
    assert [field for field in FIELD_NAMES if len(get_field_help(field)) < 10] == []


def test_every_setting_of_up_is_in_one_panel_of_its_help() -> None:
    shown = [field for fields in PANELS.values() for field in fields]
    assert sorted(shown) == sorted(set(FIELD_NAMES) - PER_NODE_FIELDS)


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_benchmarks(name: str) -> None:
    whole = make_parser({name: importlib.import_module(BENCHMARKS[name])})
    (subcommands,) = (action for action in whole._actions if action.dest == "benchmark")
    parser = subcommands.choices[name]  # type: ignore[index]
    assert isinstance(parser, argparse.ArgumentParser)
    assert parser.description
    assert [action.dest for action in parser._actions if not action.help] == []
