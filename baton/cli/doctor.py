"""`baton doctor`: check whether a cluster with these settings would work on this machine."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from baton.cli.checks import device_fence, gpu, machine, network, shared_memory, weight_cache
from baton.cli.checks import model as model_checks
from baton.cli.checks.cpu_kernels import check_cpu_kernels
from baton.cli.checks.finding import Finding
from baton.cli.common.errors import EXIT_FAILURE
from baton.cli.common.options import DEFAULT_ENDPOINT, JsonOption, add_config_options
from baton.config.settings import Config
from baton.process.cores import count_usable_cores


def register(app: typer.Typer) -> None:
    app.command("doctor")(add_config_options(doctor))


def doctor(
    settings: Config,
    endpoint: Annotated[
        str,
        typer.Option(
            "--endpoint",
            envvar="BATON_ENDPOINT",
            metavar="HOST:PORT",
            help="Who may answer already",
        ),
    ] = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Check this machine and these settings (those of `baton up`), each with its fix.

    Exits with 1 if anything is bad; warnings do not count.
    """
    findings = run_checks(settings, endpoint)
    if as_json:
        print(
            json.dumps(
                {
                    "ok": not _has_bad_finding(findings),
                    "checks": [asdict(finding) for finding in findings],
                }
            )
        )
    else:
        _print_findings(findings)
    if _has_bad_finding(findings):
        raise typer.Exit(EXIT_FAILURE)


def run_checks(settings: Config, endpoint: str) -> list[Finding]:
    """Run all checks, in the order in which they are shown."""
    found = machine.run_node_probe(model_checks.probe_arguments(settings))
    return [
        machine.check_python(),
        machine.check_torch(found),
        *gpu.check_gpus(settings, found),
        *device_fence.check_device_fence(settings, found.get("gpus", [])),
        check_cpu_kernels(settings, found),
        machine.check_encryption(),
        machine.check_cores(settings, count_usable_cores()),
        machine.check_open_files(settings),
        *shared_memory.check_segment_folder(settings),
        weight_cache.check_weight_cache(settings),
        *model_checks.check_model(settings, found),
        *network.check_network(settings, endpoint),
    ]


def _has_bad_finding(findings: Sequence[Finding]) -> bool:
    return any(finding.level == "bad" for finding in findings)


def _print_findings(findings: Sequence[Finding]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from baton.cli.views.console import make_console

    colours = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "bad": "[red]bad[/]"}
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        table.add_row(finding.name, colours[finding.level], escape(finding.detail))
        if finding.fix:
            table.add_row("", "", f"[bold]fix:[/] {escape(finding.fix)}")
    make_console().print(table)
