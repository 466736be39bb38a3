from importlib import metadata

from typer.testing import CliRunner

from baton.cli.main import app


def test_the_version_is_that_of_the_package() -> None:
    answer = CliRunner().invoke(app, ["--version"])
    assert (answer.exit_code, answer.stdout) == (0, f"baton {metadata.version('baton-serve')}\n")
