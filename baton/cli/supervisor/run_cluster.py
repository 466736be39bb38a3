"""Run the supervisor of `baton up`: show progress, announce readiness, wait for a signal.

Nothing here writes directly to a terminal, pipe or file, because their readers may stop reading at
any time.
"""

import asyncio
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.cli.supervisor.child_output import ChildOutput, LineRelay, LogFiles
from baton.cli.supervisor.daemonize import close_announcement
from baton.cli.supervisor.ports import Endpoints
from baton.cli.supervisor.rotating_file import RotatingFile
from baton.cli.supervisor.supervisor import running_cluster
from baton.config.settings import Config
from baton.process import log, log_capture, runtime
from baton.process.line_writer import DescriptorSink, LineWriter
from baton.process.startup import STARTUP

_STDOUT, _STDERR = 1, 2
_ANNOUNCE_TIMEOUT = 10.0  # seconds for the caller of --detach to read the announcement
_FLUSH_TIMEOUT = 1.0  # seconds to write the last lines of standard output


def run_cluster(config: Config, logs: Path | None, notices: Sequence[str]) -> int:
    """Run the cluster until SIGTERM or SIGINT, and return the exit code.

    The children's lines go to files in `logs`, or to this terminal if it is None. `notices` are
    printed first.
    """
    on_terminal = os.isatty(_STDERR) and logs is None
    as_text = config.log_format == "console" or (config.log_format == "auto" and on_terminal)
    announce_json = config.log_format == "json"
    if as_text:
        # Children see only a pipe, so they cannot detect the terminal themselves.
        config = dataclasses.replace(config, log_format="console")
    _prepare_process(config, logs)
    notify = _notify_as_text if as_text else _notify_as_json
    for notice in notices if logs is None else ():  # detached, the terminal has shown them
        notify(notice)
    output: ChildOutput = (
        _open_log_files(logs, config)
        if logs
        else LineRelay(_write_text_line if as_text else _write_json_line)
    )
    stdout = LineWriter(DescriptorSink(_STDOUT), log.format_drop_notice, name="stdout")

    def announce(endpoints: Endpoints) -> None:
        announcement = (
            _json_announcement(config, endpoints)
            if announce_json
            else ready_announcement(config, endpoints)
        )
        for line in announcement.splitlines():
            stdout.write(line)

    try:
        return runtime.run_event_loop(
            lambda stop: _run_until_stopped(
                config, output, notify, announce, stdout, stop, detached=logs is not None
            ),
            structured=config.log_format == "json",
            loop_factory=asyncio.new_event_loop,  # uvloop cannot start a process in a new group
        )
    finally:
        if isinstance(output, LogFiles):
            output.close()
        stdout.flush(_FLUSH_TIMEOUT)


def _prepare_process(config: Config, logs: Path | None) -> None:
    """Set up this process's own log, which goes to a file in `logs` if given, and core dumps."""
    sink = None
    if logs:
        path = logs / "up.log"
        sink = RotatingFile(path, config.log_max_bytes, config.log_backups, descriptor=_STDERR)
    log.configure_logging(config.log_level, config.log_format, sink=sink, node="up")
    log_capture.install_log_capture()
    if not config.core_dumps:
        runtime.disable_core_dumps()


async def _run_until_stopped(
    config: Config,
    output: ChildOutput,
    notify: Callable[[str], None],
    announce: Callable[[Endpoints], None],
    stdout: LineWriter,
    stop: asyncio.Event,
    *,
    detached: bool,
) -> None:
    STARTUP.finish("preparation")
    async with running_cluster(config, output, notify) as cluster:
        log.get_logger("up").info(
            f"starting {_describe_cluster(config)}: waiting for the warm-up request"
        )
        ready = asyncio.create_task(cluster.wait_until_ready())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if stop.is_set():
            ready.cancel()
        else:
            ready.result()
            announce(cluster.endpoints)
            if detached:
                await asyncio.to_thread(stdout.flush, _ANNOUNCE_TIMEOUT)
                close_announcement()
        await stop.wait()


def _open_log_files(logs: Path, config: Config) -> LogFiles:
    return LogFiles(logs, config.log_max_bytes, config.log_backups)


def _write_text_line(name: str, line: str) -> None:
    log.write_plain_line(f"{name:<12} {line}")


def _notify_as_text(text: str) -> None:
    _write_text_line("up", text)


def _write_json_line(name: str, line: str) -> None:
    """Pass on JSON lines of Baton's processes; make a JSON line of any other text."""
    if line.startswith("{") and line.endswith("}"):
        log.write_plain_line(line)
    elif line.strip():
        log.get_logger("output").info(line, node=name)


def _notify_as_json(text: str) -> None:
    log.get_logger("up").warning(text)


def _json_announcement(config: Config, endpoints: Endpoints) -> str:
    cluster = {
        "event": "ready",
        "model": config.public_model_name,
        "prefill": config.prefill,
        "decode": config.decode,
    }
    addresses = {
        "mode": config.mode,
        "http": f"http://{endpoints.http}/v1",
        "grpc": endpoints.grpc,
        "admin": f"http://{endpoints.admin}",
    }
    return json.dumps(cluster | addresses)


def ready_announcement(config: Config, endpoints: Endpoints) -> str:
    """Return what `baton up` prints once a warm-up token has come through."""
    key = ' -H "Authorization: Bearer $BATON_API_KEY"' if config.api_key else ""
    # The paced engine has no tokenizer.
    prompt = "[1, 2, 3]" if config.engine == "paced" else '"Once upon a time"'
    fields = '"return_token_ids": true, ' if config.engine == "paced" else ""
    body = f"""'{{"prompt": {prompt}, "max_tokens": 32, {fields}"stream": true}}'"""
    return (
        f"Baton is ready: {_describe_cluster(config)}\n"
        f"  HTTP   http://{endpoints.http}/v1\n"
        f"  gRPC   {endpoints.grpc}\n"
        f"  admin  http://{endpoints.admin}\n"
        f"try: curl -N http://{endpoints.http}/v1/completions{key} "
        f"-H 'Content-Type: application/json' -d {body}"
    )


def _describe_cluster(config: Config) -> str:
    nodes = (
        f"{config.prefill} prefill + {config.decode} decode"
        if config.prefill
        else f"{config.decode} decode"
    )
    return f"{config.public_model_name}, {nodes}, {config.mode}"
