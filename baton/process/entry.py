"""The start of every process of Baton: supervisor, settings, log, limits, event loop."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from baton.config.common import ProcessConfig
from baton.config.resolve import find_unknown_variables
from baton.errors import ConfigError
from baton.process import log, log_capture, runtime
from baton.process.descriptors import raise_descriptor_limit
from baton.process.failpoints import arm_from_environment
from baton.process.startup import STARTUP

_C = TypeVar("_C", bound=ProcessConfig)
STOP_GRACE_SECONDS = 12.0  # seconds that a stop may take beyond --drain-timeout


def run_process(
    load_config: Callable[[], _C], main: Callable[[_C, asyncio.Event], Awaitable[None]]
) -> int:
    """Run `main(load_config(), stop)` until it returns. Returns the exit code of the process.

    The process is killed when its supervisor dies.
    """
    supervisor = os.environ.get("BATON_SUPERVISOR_PID")
    if supervisor:
        runtime.exit_with_parent(int(supervisor))
    STARTUP.end_phase("imports")
    try:
        arm_from_environment()
        config = load_config()
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return runtime.EXIT_USAGE
    STARTUP.end_phase("settings")
    log.configure_logging(config.log_level, config.log_format)
    log_capture.install_log_capture()
    raise_descriptor_limit()
    if not config.core_dumps:
        runtime.disable_core_dumps()
    for notice in find_unknown_variables(os.environ):
        log.get_logger("settings").warning(notice)
    return runtime.run_event_loop(
        lambda stop: main(config, stop), longest_stop=config.drain_timeout + STOP_GRACE_SECONDS
    )
