"""How the capture of CUDA graphs is shown, and what happens if it fails."""

import sys
from collections.abc import Callable
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import Progress

from baton.process import log


class CaptureProgress:
    """Shows a capture on a terminal. As a context, turns its failure into a warning.

    A node without graphs is slower, but right. A lost GPU is an error.
    """

    def __init__(self, steps: str, total: int, is_wanted: Callable[[], bool]) -> None:
        """`steps`: what is captured. `total`: number of captures."""
        self.has_failed = False
        self._steps = steps
        self._is_wanted = is_wanted
        console = Console(stderr=True)
        self._bar = Progress(console=console, transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task(f"capturing CUDA graphs of {steps}", total=total)
        self._inference = torch.inference_mode()

    def on_captured(self, _: int) -> bool:
        """Count a capture; returns whether to go on."""
        self._bar.advance(self._task)
        return self._is_wanted()

    def __enter__(self) -> "CaptureProgress":
        self._bar.start()
        self._inference.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._inference.__exit__(kind, error, traceback)
        self._bar.stop()
        if not isinstance(error, RuntimeError):
            return False
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # raises again if the device is lost
        log.get_logger("engine").warning(
            "cuda graphs not captured, steps are slower",
            steps=self._steps,
            reason=str(error).partition("\n")[0],
        )
        self.has_failed = True
        return True
