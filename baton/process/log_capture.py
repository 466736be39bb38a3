"""Sends logs, warnings and uncaught errors of Python and libraries through Baton's own log.

They never block, and have no messages of exceptions, which may quote a prompt.
"""

import asyncio
import faulthandler
import logging
import sys
import threading
from types import TracebackType
from typing import Any

from baton.process import log

_MAX_MESSAGE = 300  # characters of a library's line


class _StructlogHandler(logging.Handler):
    """Forwards the first line of each record; further lines may quote a prompt."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage().strip().partition("\n")[0][:_MAX_MESSAGE]
            error = record.exc_info[1] if record.exc_info else None
            fields = log.get_error_fields(error) if error is not None else {}
            log.get_logger(record.name).log(record.levelno, text, **fields)
        except Exception:  # the arguments do not match the format
            log.get_logger(record.name).log(
                record.levelno, "a library's log line could not be rendered"
            )


def install_log_capture() -> None:
    """Install the hooks for this process, after `configure_logging`."""
    logging.raiseExceptions = False
    logging.basicConfig(level=logging.WARNING, handlers=[_StructlogHandler()], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _on_uncaught_exception
    sys.unraisablehook = _on_unraisable
    threading.excepthook = _on_thread_exception
    faulthandler.enable()  # its tracebacks show no values


def on_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that the event loop reports, such as one of a task that was never awaited."""
    message = str(context.get("message", "error in the event loop"))
    error = context.get("exception")
    log.get_logger("asyncio").error(
        message.partition("\n")[0][:_MAX_MESSAGE],
        **(log.get_error_fields(error) if error is not None else {}),
    )


def _on_uncaught_exception(
    kind: type[BaseException], error: BaseException, _: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    log.get_logger("process").critical(
        "uncaught exception, process ended", **log.get_error_fields(error)
    )
    log.flush_log()


def _on_unraisable(raised: "sys.UnraisableHookArgs") -> None:
    fields = log.get_error_fields(raised.exc_value) if raised.exc_value is not None else {}
    log.get_logger("process").error(raised.err_msg or "error in a finalizer or callback", **fields)


def _on_thread_exception(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is None:
        return
    thread = ended.thread.name if ended.thread is not None else ""
    log.get_logger("process").error(
        "uncaught exception, thread ended", thread=thread, **log.get_error_fields(ended.exc_value)
    )
