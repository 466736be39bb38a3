"""Structured logs on standard error: one line per event, and never a prompt or an output.

A separate thread writes the lines (baton/process/line_writer.py), so that no caller waits for the
reader of standard error or gets its errors.
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

_MAX_FRAMES = 8  # innermost frames in the field `traceback`
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
_FINAL_FLUSH_SECONDS = 1.0  # longest wait for the last lines at the end of a process
_MAX_VALUE_CHARACTERS = 4096

_writer: LineWriter | None = None  # of this process
_context: dict[str, str] = {}  # fields of every line, of all threads


def _add_context(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {**_context, **event}


def _withhold_content(
    _: Any, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Replace fields that hold clients' content. To log one is a programming error."""
    for key in _WITHHELD_FIELDS & event.keys():
        event[key] = "(withheld)"
    return event


def _replace_exception(
    _: Any, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Replace an exception given as `exc_info` by the fields of `get_error_fields`."""
    raised = event.pop("exc_info", None)
    if isinstance(raised, tuple):
        raised = raised[1]
    error = raised if isinstance(raised, BaseException) else sys.exc_info()[1] if raised else None
    return {**event, **get_error_fields(error)} if error is not None else event


def _truncate_values(
    _: Any, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Truncate long values: a line that LineWriter truncates would not be valid JSON."""
    for key, value in event.items():
        if isinstance(value, str) and len(value) > _MAX_VALUE_CHARACTERS:
            event[key] = f"{value[:_MAX_VALUE_CHARACTERS]}... ({len(value)} characters)"
    return event


class _SafeRenderer:
    """A renderer that never raises, also if the `repr` of a field does."""

    def __init__(self, renderer: structlog.typing.Processor) -> None:
        self._renderer = renderer

    def __call__(self, logger: Any, method: str, event: structlog.typing.EventDict) -> Any:
        try:
            return self._renderer(logger, method, event)
        except Exception as error:
            name = type(error).__name__
            return f'{{"event": "a log line could not be rendered", "error_type": "{name}"}}'


class _LineWriterLogger:
    """The logger that structlog passes rendered lines to, at every level."""

    def __init__(self, writer: LineWriter) -> None:
        self.debug = self.info = self.warning = self.error = self.critical = self.exception = (
            writer.write
        )
        self.warn = self.msg = self.log = self.fatal = self.failure = self.err = writer.write


def configure_logging(
    level: str, fmt: str, *, sink: LineSink | None = None, **context: str
) -> None:
    """Set up logging for this process.

    `context` (node name, role) is added to every line. Lines go to standard error unless the first
    call names another `sink`.
    """
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
    """Return a logger whose lines have `name` as the field `part`."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(part=name)
    return logger


def get_traceback_frames(error: BaseException) -> list[str]:
    """Return the frames of a traceback as "file:line function", innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    return [
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
        for frame in frames[-_MAX_FRAMES:]
    ]


def get_error_fields(error: BaseException) -> dict[str, Any]:
    """Return log fields that say what was raised and where.

    The message is included only for a BatonError: others may quote a prompt.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    ours = {"reason": error.message} if isinstance(error, BatonError) else {}
    return {"error_type": type(error).__name__, "traceback": get_traceback_frames(error), **ours}


def get_dropped_lines() -> int:
    """Return how many log lines of this process were lost."""
    return _writer.dropped_lines if _writer is not None else 0


def get_log_counters() -> dict[str, float]:
    """Return the counters of the log that a node reports in its heartbeats."""
    return {"log_lines_dropped_total": float(get_dropped_lines())}


def flush_log(timeout: float = _FINAL_FLUSH_SECONDS) -> None:
    """Wait until the lines logged so far are written, for at most `timeout` seconds.

    Call it before `os._exit`, which does not run exit handlers.
    """
    if _writer is not None:
        _writer.flush(timeout)


def write_plain_line(line: str) -> None:
    """Write a line that is not structured, after everything that was logged before."""
    if _writer is None:
        sys.stderr.write(f"{line}\n")
    else:
        _writer.write(line)


def log_fatal_error(reason: str) -> None:
    """Log why this process ends."""
    get_logger("runtime").error("process failed", reason=reason)


def format_drop_notice(lines: int) -> str:
    """Format the line that reports so many dropped lines."""
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
