"""What probes and health checks ask. Owned by `warmup.py`; a coordinator whose tokenizer has not
loaded is not warm."""

from collections.abc import Callable
from typing import Protocol


class Readiness(Protocol):
    on_change: list[
        Callable[[bool, str], None]
    ]  # called with (ready, reason) when that has changed

    def state(self) -> tuple[bool, str]:
        """(True, "") or (False, why not)."""
        ...
