"""Layer callbacks for steps that tests run themselves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.kv.device_event import DeviceEvent
from baton.types import BlockIndex


@dataclass(slots=True)
class FunctionCallback:
    """A LayerCallback that calls a function."""

    function: Callable[[int], object]
    blocks: Sequence[BlockIndex] = ()
    slowed_seconds: float = 0.0

    def ends_group(self, layer: int) -> bool:
        return True

    def on_launching(self) -> None: ...

    def on_launched(self, layer_ends: Sequence[DeviceEvent]) -> None: ...

    def __call__(self, layer: int) -> None:
        self.function(layer)
