"""A point in the order of launches that the host can wait for."""

import torch


class LaunchMark:
    """An event on a GPU. In Triton's interpreter launches have ended when they return."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        """Mark what is launched so far on the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until what was marked has ended; at once if nothing was."""
        if self._event is not None:
            self._event.synchronize()
