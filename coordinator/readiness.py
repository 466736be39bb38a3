"""Whether the coordinator welcomes requests, and what it still waits for. One owner for the fact; many tell it."""

from collections.abc import Callable


class Readiness:
    """Ready when nothing holds it back. `hold` and `release` name what does ("warm-up", "tokenizer", "shutdown")."""

    def __init__(self) -> None:
        self._held: dict[str, str] = {}
        self._listeners: list[Callable[[bool], None]] = []
        self._told = False

    @property
    def ready(self) -> bool:
        return not self._held

    @property
    def reason(self) -> str:
        """Why not ready, "" if ready."""
        return "; ".join(self._held.values())

    def hold(self, part: str, reason: str) -> None:
        self._held[part] = reason
        self._tell()

    def release(self, part: str) -> None:
        self._held.pop(part, None)
        self._tell()

    def listen(self, listener: Callable[[bool], None]) -> None:
        """Call `listener(ready)` at every change, and once now."""
        self._listeners.append(listener)
        listener(self.ready)
        self._told = self.ready

    def _tell(self) -> None:
        if self.ready != self._told:
            self._told = self.ready
            for listener in self._listeners:
                listener(self.ready)
