"""Announces to the transfer plane which blocks a step completes, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import HandoffFailed
from baton.process.failpoints import FAILPOINTS, failpoint
from baton.types import AttemptKey, BlockIndex
from kv_transfer.plane import OutboundPlane


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Logical blocks of one attempt that a step completes, and where they are."""

    key: AttemptKey
    first_block: int  # logical block that `blocks` begins with
    blocks: tuple[BlockIndex, ...]


@dataclass(frozen=True, slots=True)
class LayerAnnouncer:
    """A LayerCallback for one step: after each layer its blocks may be sent."""

    plane: OutboundPlane
    ranges: Sequence[BlockRange]

    @property
    def blocks(self) -> Sequence[BlockIndex]:
        """None, if the plane reads the device's own memory."""
        if self.plane.reads_device_memory:
            return ()
        return [block for completed in self.ranges for block in completed.blocks]

    def __call__(self, layer: int) -> None:
        self._announce_layer(layer)
        self._hold_until_landed(layer)

    @failpoint("prefill.layer")
    def _announce_layer(self, layer: int) -> None:
        for completed in self.ranges:
            self.plane.announce_layer(completed.key, layer, completed.first_block, completed.blocks)

    def _hold_until_landed(self, layer: int) -> None:
        """For tests: the failpoint `prefill.layer.landed` holds the next layer."""
        timeout = FAILPOINTS.get_argument("prefill.layer.landed")
        if timeout is None:
            return
        for completed in self.ranges:
            if not self.plane.wait_for_layer(completed.key, layer, timeout):
                raise HandoffFailed(
                    f"layer {layer} of {completed.key} did not land within {timeout} s"
                )
