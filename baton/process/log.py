"""Structured logs on standard error: one line an event, with node and request ids, and never a
prompt or an output.

A line is written by a thread of its own (baton/process/line_writer.py): nothing that logs waits for
the reader of standard error or sees its errors.
"""

import atexit
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import structlog

from baton.errors import BatonError
from baton.process.line_writer import DescriptorSink, LineSink, LineWriter

_MAX_FRAMES = 8  # innermost frames that `places` names
_WITHHELD_FIELDS = frozenset(
    {
        "body",
        "context_token_ids",
        "emitted",
        "emitted_token_ids",
        "messages",
        "prompt",
        "prompt_token_ids",
        "text",
        "token_ids",
        "tokens",
    }
)
_STDERR = 2
_FINAL_FLUSH_SECONDS = 1.0  # seconds that the end of a process waits for its last lines
_MAX_VALUE_CHARACTERS = 4096  # characters of a field

_writer: LineWriter | None = None  # of this process
_context: dict[str, str] = {}  # in every line, whatever thread speaks


def _add_context(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {**_context, **event}


def _withhold_content(
    _: Any, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Clients' content has no business in a log: a call that tries is a programming error, shown as
    such."""
    for key in _WITHHELD_FIELDS & event.keys():
        event[key] = "(withheld)"
    return event


def _replace_exception(
    _: Any, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Of an exception that is logged with `exc_info`, only what `describe_error` tells."""
    raised = event.pop("exc_info", None)
    if isinstance(raised, tuple):
        raised = raised[1]
    error = raised if isinstance(raised, BaseException) else sys.exc_info()[1] if raised else None
    return {**event, **get_error_fields(error)} if error is not None else event


def _truncate_values(
    _: Any, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """A line that is too long would be cut, and be no JSON any more."""
    for key, value in event.items():
        if isinstance(value, str) and len(value) > _MAX_VALUE_CHARACTERS:
            event[key] = f"{value[:_MAX_VALUE_CHARACTERS]}... ({len(value)} characters)"
    return event


class _SafeRenderer:
    """A renderer that does not raise, whatever a field's `repr` does."""

    def __init__(self, renderer: structlog.typing.Processor) -> None:
        self._renderer = renderer

    def __call__(self, logger: Any, method: str, event: structlog.typing.EventDict) -> Any:
        try:
            return self._renderer(logger, method, event)
        except Exception as error:
            return (
                f'{{"event": "a log line could not be rendered", "kind": "{type(error).__name__}"}}'
            )


class _LineWriterLogger:
    """What structlog hands a rendered line to, whatever its level."""

    def __init__(self, writer: LineWriter) -> None:
        self.debug = self.info = self.warning = self.error = self.critical = self.exception = (
            writer.write
        )
        self.warn = self.msg = self.log = self.fatal = self.failure = self.err = writer.write


def configure_logging(
    level: str, fmt: str, *, sink: LineSink | None = None, **context: str
) -> None:
    """Set up logging for this process. `context` (node name, role) is bound to every line. Lines go
    to standard error unless the first call names another `sink`."""
    terminal = os.isatty(_STDERR)
    console = fmt == "console" or (fmt == "auto" and terminal)
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=terminal)
        if console
        else structlog.processors.JSONRenderer()
    )
    writer = _get_shared_writer(sink)
    structlog.configure(
        processors=[
            _add_context,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _withhold_content,
            _replace_exception,
            _truncate_values,
            _SafeRenderer(renderer),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: _LineWriterLogger(writer),
        cache_logger_on_first_use=False,
    )
    _context.update(context)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose lines say which part of the process speaks."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(part=name)
    return logger


def get_traceback_places(error: BaseException) -> list[str]:
    """Where it came from, innermost last. An exception's message is not for the log: it may quote a
    prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    return [
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
        for frame in frames[-_MAX_FRAMES:]
    ]


def get_error_fields(error: BaseException) -> dict[str, Any]:
    """Fields that say what was raised and where. The message is told only of errors whose messages
    are ours."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    ours = {"reason": error.message} if isinstance(error, BatonError) else {}
    return {"kind": type(error).__name__, "places": get_traceback_places(error), **ours}


def get_dropped_lines() -> int:
    """Lines of this process that its standard error never took."""
    return _writer.dropped_lines if _writer is not None else 0


def get_log_counters() -> dict[str, float]:
    """What a member of the cluster reports of its log by heartbeat."""
    return {"log_lines_dropped_total": float(get_dropped_lines())}


def flush_log(timeout: float = _FINAL_FLUSH_SECONDS) -> None:
    """Wait for what was logged up to now, at most so many seconds. To be called before `os._exit`,
    which runs nothing of what a process does at its end."""
    if _writer is not None:
        _writer.flush(timeout)


def write_plain_line(line: str) -> None:
    """A line that is not structured, behind everything that was logged before."""
    if _writer is None:
        sys.stderr.write(f"{line}\n")
    else:
        _writer.write(line)


def log_fatal_error(reason: str) -> None:
    """Why this process ends, as a line of its log."""
    get_logger("runtime").error("ended by an error", reason=reason)


def format_drop_notice(lines: int) -> str:
    """The line that stands where so many were dropped."""
    event: Any = {"part": "log", "event": "log lines dropped", "lines": lines}
    for processor in structlog.get_config()["processors"]:
        event = processor(None, "warning", event)
    return str(event)


def _get_shared_writer(sink: LineSink | None) -> LineWriter:
    global _writer
    if _writer is None:
        _writer = LineWriter(sink or DescriptorSink(_STDERR), format_drop_notice)
        atexit.register(flush_log)
    return _writer
