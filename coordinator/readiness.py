"""The interface of health checks to the readiness of the cluster (`ClusterReadiness`)."""

from collections.abc import Callable
from typing import Protocol


class Readiness(Protocol):
    # Called with (ready, reason) when the state has changed.
    on_change: list[Callable[[bool, str], None]]

    def state(self) -> tuple[bool, str]:
        """Return (True, ""), or (False, the reason why the cluster is not ready)."""
        ...
