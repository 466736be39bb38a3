"""`up` after its checks: run the supervisor, show progress, announce, wait for a signal."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console

from baton import log, runtime
from baton.cli import detach
from baton.cli.output import LogFiles, Output, Relay
from baton.cli.ports import Endpoints
from baton.cli.supervisor import running
from baton.config import Config, model_name


def supervise(config: Config, logs: Path | None) -> int:
    """Run the cluster until SIGTERM or SIGINT. With `logs` the children write files there, else to this terminal.
    Returns the exit code."""
    console = Console(stderr=True)
    if console.is_terminal and config.log_format == "auto" and logs is None:
        config = msgspec.structs.replace(config, log_format="console")  # children see a pipe, we know the terminal
    log.configure(config.log_level, config.log_format, node="up")
    if not config.core_dumps:
        runtime.forbid_core_dumps()

    def write(name: str, line: str) -> None:
        console.print(f"{name:<12} {line}", markup=False, highlight=False, soft_wrap=True)

    def tell(text: str) -> None:
        write("up", text)

    output: Output = LogFiles(logs) if logs else Relay(write)
    return runtime.run(lambda stop: _run(config, output, tell, console, stop, detached=logs is not None))


async def _run(
    config: Config,
    output: Output,
    tell: Callable[[str], None],
    console: Console,
    stop: asyncio.Event,
    *,
    detached: bool,
) -> None:
    async with running(config, output, tell) as cluster:
        with _progress(console, config):
            ready = asyncio.create_task(cluster.ready())
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
        if stop.is_set():
            ready.cancel()
        else:
            ready.result()
            print(announcement(config, cluster.endpoints), flush=True)
            if detached:
                detach.announced()
        await stop.wait()


@contextlib.contextmanager
def _progress(console: Console, config: Config) -> Iterator[None]:
    if not console.is_terminal:
        yield
        return
    with console.status(f"starting {_shape(config)} (a warm-up token has to come through)"):
        yield


def announcement(config: Config, where: Endpoints) -> str:
    """What `up` prints once a token has come through."""
    key = ' -H "Authorization: Bearer $BATON_API_KEY"' if config.api_key else ""
    prompt = "[1, 2, 3]" if config.engine == "paced" else '"Once upon a time"'  # the paced engine has no tokenizer
    fields = '"return_token_ids": true, ' if config.engine == "paced" else ""
    body = f"""'{{"prompt": {prompt}, "max_tokens": 32, {fields}"stream": true}}'"""
    return (
        f"Baton is ready: {_shape(config)}\n"
        f"  HTTP   http://{where.http}/v1\n"
        f"  gRPC   {where.grpc}\n"
        f"  admin  http://{where.admin}\n"
        f"try: curl -N http://{where.http}/v1/completions{key} -H 'Content-Type: application/json' -d {body}"
    )


def _shape(config: Config) -> str:
    nodes = f"{config.prefill} prefill + {config.decode} decode" if config.prefill else f"{config.decode} decode"
    return f"{model_name(config)}, {nodes}, {config.mode}"
