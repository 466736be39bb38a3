"""`baton up`: run the whole cluster on this machine."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.common.errors import exit_code, print_error
from baton.cli.common.options import add_config_options
from baton.config.resolve import find_unknown_variables
from baton.config.settings import Config
from baton.errors import BatonError


def register(app: typer.Typer) -> None:
    app.command("up")(add_config_options(up))


def up(
    settings: Config,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once it serves; stop it with `baton down`")
    ] = False,
) -> None:
    """Start coordinator, prefill and decode nodes, and keep them running.

    Prints where it listens once ready. Ctrl-C or SIGTERM drains and stops every child; a child that
    dies is started again. Each setting is also a variable BATON_<NAME> and a key of --config FILE;
    flag > variable > file > default.
    """
    from baton.process.startup import STARTUP  # imports the log, which other commands do without

    STARTUP.end_phase("imports")
    try:
        code = _prepare_and_run(settings, detach)
    except BatonError as error:
        print_error(error, as_json=settings.log_format == "json")
        code = exit_code(error)
    raise typer.Exit(code)


def _prepare_and_run(settings: Config, detach: bool) -> int:
    """Do all checks that need no process, then run the supervisor and return its exit code.

    Raises BatonError.
    """
    from baton.cli.common.default_model import find_default_model
    from baton.cli.supervisor.child_specs import check_threads, complete_config
    from baton.cli.supervisor.daemonize import daemonize
    from baton.cli.supervisor.machine_plan import fit_machine
    from baton.cli.supervisor.ports import reserve_ports
    from baton.cli.supervisor.state_folder import PidFile, state_folder
    from baton.models.model_source import with_local_model
    from baton.shared_memory.segment import remove_stale_segments

    check_threads(settings.threads)  # reports a bad value before anything else happens
    config, notices = complete_config(settings)
    if not config.model and config.engine == "model":
        config = dataclasses.replace(config, model=str(find_default_model()))
    remove_stale_segments(Path(config.segment_dir))  # killed processes leave segments behind
    config, machine_notices = fit_machine(config)
    config = with_local_model(config)
    notices += [*machine_notices, *find_unknown_variables(os.environ)]
    config, reserved_sockets = reserve_ports(config)
    folder = state_folder(config)
    pid_file = PidFile(folder)
    logs = folder / "logs"
    config = dataclasses.replace(config, state_dir=str(folder))
    if detach:
        logs.mkdir(exist_ok=True)
        for notice in notices:
            sys.stderr.write(f"{notice}\n")
        daemonize(logs / "up.log")
    pid_file.write_pid()
    try:
        return _run_supervisor(config, logs if detach else None, notices)
    finally:
        pid_file.release()
        for reserved in reserved_sockets:
            reserved.close()


def _run_supervisor(config: Config, logs: Path | None, notices: Sequence[str]) -> int:
    from baton.cli.supervisor.run_cluster import run_cluster

    return run_cluster(config, logs, notices)
