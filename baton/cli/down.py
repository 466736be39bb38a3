"""`baton down`: stop the cluster that `up` runs on this machine, detached or not."""

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.common.errors import CommandFailed
from baton.cli.supervisor.restart_policy import max_stop_seconds
from baton.config.resolve import resolve_config

_STOP_MARGIN_SECONDS = 5.0  # beyond what the supervisor may need


def register(app: typer.Typer) -> None:
    app.command("down")(down)


def down(
    port: Annotated[
        str | None, typer.Option(metavar="N", help="HTTP port of the cluster (default 8000)")
    ] = None,
    state_dir: Annotated[str | None, typer.Option(metavar="DIR", help="Its state folder")] = None,
    config_file: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="TOML file of settings")
    ] = None,
    segment_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Its folder of segments")
    ] = None,
) -> None:
    """Drain and stop the cluster of this machine.

    Returns when no process and no shared memory of it is left.
    """
    from baton.cli.supervisor.state_folder import state_folder, stop_cluster
    from baton.shared_memory.segment import remove_stale_segments

    flags = {"port": port, "state_dir": state_dir, "segment_dir": segment_dir}
    config = resolve_config(
        {key: value for key, value in flags.items() if value is not None}, file=config_file
    )
    folder = state_folder(config)
    by_itself = stop_cluster(folder, max_stop_seconds(config.drain_timeout) + _STOP_MARGIN_SECONDS)
    remove_stale_segments(Path(config.segment_dir))
    if not by_itself:
        raise CommandFailed(f"the cluster of {folder} did not stop in time and was killed")
    print("stopped")
