"""Values that the hand-off state machines of both sides share."""

from dataclasses import dataclass

CUDA_IPC = "cuda_ipc"  # the transport whose writers are devices; see kv_transfer/device
NEVER = float("inf")  # a deadline that does not come


@dataclass(frozen=True, slots=True)
class IgnoredInput:
    """An input that changed nothing. It is only counted, by its reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """The geometry of an arena. Every frame of a hand-off is checked against it."""

    num_layers: int
    num_kv_heads: int
    slab_bytes: int


def is_one_sided(transport: str) -> bool:
    """Whether a writer copies slabs into decode's mapped arena, instead of sending them."""
    return transport in ("shm", CUDA_IPC)
