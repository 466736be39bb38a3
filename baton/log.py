"""Structured logs on standard error: one line an event, with node and request ids, and never a prompt or an output."""

import logging
import sys
from typing import Any

import structlog

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
