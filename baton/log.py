"""Structured logs on standard error: one line an event, with node and request ids, and never a prompt or an output."""

import logging
import sys
import traceback
from pathlib import Path
from typing import Any

import structlog

_DEPTH = 8  # innermost frames that `places` names
_FORBIDDEN = frozenset({"prompt", "text", "tokens", "token_ids", "emitted", "messages", "body"})


def _no_content(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Clients' content has no business in a log: a call that tries is a programming error, shown as such."""
    for key in _FORBIDDEN & event.keys():
        event[key] = "(withheld)"
    return event


def configure(level: str, fmt: str, **context: str) -> None:
    """Set up logging for this process. `context` (node name, role) is bound to every line."""
    console = fmt == "console" or (fmt == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()) if console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _no_content,
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(**context)


def get(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose lines say which part of the process speaks."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(part=name)
    return logger


def places(error: BaseException) -> list[str]:
    """Where it came from, innermost last. An exception's message is not for the log: it may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[-_DEPTH:]]
