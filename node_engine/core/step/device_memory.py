"""How much of a device's memory the KV cache of a node gets. Arithmetic on what was measured."""

from dataclasses import dataclass

from baton.config.memory_size import AUTO, parse_memory_size
from baton.errors import ConfigError
from baton.shared_memory.available_memory import format_size

# Kept free: what libraries allocate later, and gaps between the tensors of steps.
_RESERVE_SHARE = 0.03  # of the device's memory
_MIN_RESERVE_BYTES = 1 << 30
# Of the host memory that is available, what `auto` pins for the copy of the cache.
_AUTO_HOST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class DeviceMemoryProfile:
    """The memory of a device with the weights of a model and without its cache, in bytes."""

    total_bytes: int
    free_bytes: int
    weight_bytes: int  # of this process: weights and tables
    activation_bytes: int  # peak of the widest steps
    graph_bytes: int  # estimate for captured graphs

    @property
    def reserve_bytes(self) -> int:
        return max(_MIN_RESERVE_BYTES, int(_RESERVE_SHARE * self.total_bytes))

    @property
    def room_bytes(self) -> int:
        """What KV blocks can take."""
        taken = self.activation_bytes + self.graph_bytes + self.reserve_bytes
        return max(0, self.free_bytes - taken)

    def compute_fair_share(self, nodes: int) -> int:
        """What KV blocks may take so that as many equal nodes have room on the device."""
        own = self.weight_bytes + self.activation_bytes + self.graph_bytes + self.reserve_bytes
        return max(0, self.total_bytes // nodes - own)

    def describe(self) -> str:
        """The figures behind `room_bytes`, for messages."""
        return (
            f"{format_size(self.free_bytes)} of {format_size(self.total_bytes)} are free beside"
            f" the model's weights, of which {format_size(self.activation_bytes)} are for"
            f" activations, {format_size(self.graph_bytes)} for CUDA graphs and"
            f" {format_size(self.reserve_bytes)} in reserve"
        )


def compute_device_cache_bytes(
    kv_memory: str,
    memory: DeviceMemoryProfile,
    nodes_per_gpu: int,
    host_bytes: int,
    nodes_per_host: int = 1,
) -> int:
    """Bytes that --kv-memory gives the cache of a node on a GPU.

    A share is one of the device's memory. `auto` is the least of the room on the device, the
    node's share of a device that several nodes use, and this node's part of half of `host_bytes`,
    which are available for the copy in host memory. Raises ConfigError for an explicit size that
    the device has no room for.
    """
    room = memory.room_bytes
    if kv_memory == AUTO:
        of_host = int(_AUTO_HOST_SHARE * host_bytes) // max(nodes_per_gpu, nodes_per_host)
        return min(room, memory.compute_fair_share(nodes_per_gpu), of_host)
    size = parse_memory_size(kv_memory, memory.total_bytes)
    if size > room:
        raise ConfigError(
            f"kv_memory {kv_memory!r} is {size} bytes ({format_size(size)}): the GPU has room for"
            f" {format_size(room)}: {memory.describe()}: lower --kv-memory, --max-batched-tokens or"
            " --max-num-seqs, or stop what else uses the GPU",
            param="kv_memory",
        )
    return size
