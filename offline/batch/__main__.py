"""`baton run-batch`: answer a file of requests. See docs/batch.md."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.cli.common.default_model import find_default_model
from baton.cli.common.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_UNREACHABLE,
    exit_code,
    print_error,
)
from baton.config import flags as config_flags
from baton.config.resolve import read_secret, resolve_config
from baton.errors import BatonError, ConfigError
from offline.batch.run_batch import BatchCounts, answer_requests, open_batch
from offline.endpoint import EndpointUnavailable
from offline.event_loop_thread import EventLoopThread
from offline.open_endpoint import (
    DEFAULT_OPTIONS,
    EndpointOptions,
    is_url,
    list_engine_settings,
    opened_endpoint,
)
from offline.progress import show_progress


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton run-batch",
        description="Answer the requests of a file in OpenAI's batch format, each exactly once. A"
        " batch that was interrupted goes on when the same command is run again.",
        epilog="Exit codes: 0 every request was answered, 1 some got an error, 2 wrong usage,"
        " 3 cannot reach the cluster.",
        allow_abbrev=False,
    )
    parser.add_argument("input", type=Path, help="JSON lines: custom_id, method, url, body")
    parser.add_argument("output", type=Path, help="gets a line for each, in any order")
    parser.add_argument(
        "--url", metavar="URL", help="of a cluster; without it, an engine starts in this process"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("BATON_API_KEY", ""),
        metavar="KEY|@FILE",
        help="if the cluster has one (BATON_API_KEY)",
    )
    _add_endpoint_options(parser)
    config_flags.add_config_flags(parser, list_engine_settings())
    return parser


def _add_endpoint_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-in-flight",
        type=int,
        default=DEFAULT_OPTIONS.max_in_flight,
        metavar="N",
        help="requests that are answered at once (default %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_OPTIONS.answer_seconds,
        metavar="SECONDS",
        help="that an answer of a cluster may take (default %(default)g)",
    )
    parser.add_argument(
        "--retry-timeout",
        type=float,
        default=DEFAULT_OPTIONS.retry_seconds,
        metavar="SECONDS",
        help="for which a request that a cluster refuses is sent again (default %(default)g)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a batch; returns the exit code."""
    options = make_parser().parse_args(argv)
    try:
        counts = run_batch(options)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: run the same command again to go on\n")
        return EXIT_INTERRUPTED
    except EndpointUnavailable as error:
        sys.stderr.write(f"error: {error}: run the same command again to go on\n")
        return EXIT_UNREACHABLE
    except BatonError as error:
        print_error(error, as_json=False)
        return exit_code(error)
    sys.stderr.write(_summarize(counts) + "\n")
    return EXIT_FAILURE if counts.failed else 0


def run_batch(options: argparse.Namespace) -> BatchCounts:
    """Raises ConfigError, EndpointUnavailable, OutputFailed and NodeFailed."""
    settings = config_flags.get_typed_settings(options)
    key, model = str(settings.pop("api_key")), str(settings.pop("model", ""))
    if options.url and model:
        raise ConfigError(f"--model {model} and --url {options.url} are given: give one of them")
    if options.url and not is_url(options.url):
        raise ConfigError(f"--url {options.url} is not an http:// or https:// URL")
    requests, output, counts = open_batch(options.input, options.output)
    with output:
        if counts.answered_before < counts.num_requests:
            target = options.url or model or _choose_model(settings)
            endpoint_options = EndpointOptions(
                read_secret(key, "api_key"),
                options.max_in_flight,
                options.timeout,
                options.retry_timeout,
            )
            with (
                EventLoopThread("baton-batch") as thread,
                opened_endpoint(thread, target, endpoint_options, settings) as endpoint,
                show_progress(
                    counts.num_requests, "requests", done=counts.answered_before
                ) as advance,
            ):
                thread.call(
                    answer_requests(
                        requests, output, endpoint, counts, options.max_in_flight, advance
                    )
                )
    return counts


def _choose_model(settings: Mapping[str, object]) -> str:
    """Return the model of BATON_* variables, or the bundled one; the paced engine needs none."""
    config = resolve_config({"engine": settings["engine"]} if "engine" in settings else {})
    needs_none = config.model or config.engine == "paced"
    return config.model if needs_none else str(find_default_model())


def _summarize(counts: BatchCounts) -> str:
    done = counts.answered_before + counts.answered
    parts = [f"{done} of {counts.num_requests} requests answered"]
    if counts.answered_before:
        parts.append(f"{counts.answered_before} of them in earlier runs")
    if counts.failed:
        parts.append(f"{counts.failed} with an error")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
