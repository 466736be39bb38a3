"""How much of a GPU's memory a node's cache gets, and how the figures are stated."""

import pytest

from baton.errors import ConfigError
from node_engine.core.step.device_memory import DeviceMemoryProfile, compute_device_cache_bytes

GIB = 1 << 30
PLENTY = 1 << 50  # bytes of host memory


def device(total: int = 80, free: int = 62, weights: int = 16) -> DeviceMemoryProfile:
    """A device of `total` GiB with a model, in GiB; 2.4 GiB of 80 are kept in reserve."""
    return DeviceMemoryProfile(total * GIB, free * GIB, weights * GIB, 1 * GIB, 2 * GIB)


def test_auto_takes_what_is_free_beside_steps_graphs_and_the_reserve() -> None:
    memory = device()
    assert memory.reserve_bytes == int(0.03 * 80 * GIB)
    assert memory.room_bytes == (62 - 1 - 2) * GIB - memory.reserve_bytes
    fair = memory.compute_fair_share(1)
    assert fair == (80 - 16 - 1 - 2) * GIB - memory.reserve_bytes
    assert compute_device_cache_bytes("auto", memory, 1, PLENTY) == memory.room_bytes < fair


def test_auto_leaves_each_node_of_a_gpu_its_share() -> None:
    """Nodes that measure at the same time, or one after the other, all fit."""
    first = device(free=62)
    both_loaded = device(free=80 - 2 * 17)
    cache = compute_device_cache_bytes("auto", first, 2, PLENTY)
    assert cache == first.compute_fair_share(2) == 40 * GIB - 19 * GIB - first.reserve_bytes
    assert compute_device_cache_bytes("auto", both_loaded, 2, PLENTY) == cache
    second = DeviceMemoryProfile(
        first.total_bytes,
        both_loaded.free_bytes - cache - first.activation_bytes - first.graph_bytes,
        first.weight_bytes,
        first.activation_bytes,
        first.graph_bytes,
    )
    assert compute_device_cache_bytes("auto", second, 2, PLENTY) == cache


def test_auto_takes_half_of_the_host_memory_at_most() -> None:
    assert compute_device_cache_bytes("auto", device(), 1, 20 * GIB) == 10 * GIB
    assert compute_device_cache_bytes("auto", device(), 2, 20 * GIB) == 5 * GIB
    # the other three nodes of the host have GPUs of their own
    assert compute_device_cache_bytes("auto", device(), 1, 20 * GIB, 4) == 2.5 * GIB


def test_auto_on_a_full_device_is_nothing() -> None:
    assert compute_device_cache_bytes("auto", device(free=4), 1, PLENTY) == 0
    assert compute_device_cache_bytes("auto", device(total=16, free=12), 2, PLENTY) == 0


def test_a_share_is_of_the_whole_device_and_a_size_is_a_size() -> None:
    assert compute_device_cache_bytes("0.5", device(), 2, PLENTY) == 40 * GIB
    assert compute_device_cache_bytes("30GiB", device(), 2, PLENTY) == 30 * GIB


@pytest.mark.parametrize("kv_memory", ["0.9", "60GiB"])
def test_a_size_that_does_not_fit_is_refused_with_figures(kv_memory: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compute_device_cache_bytes(kv_memory, device(), 1, PLENTY)
    message = str(caught.value)
    for figure in ("room for 56.6GiB", "62.0GiB of 80.0GiB", "1.0GiB", "2.0GiB", "2.4GiB"):
        assert figure in message
    assert "lower --kv-memory, --max-batched-tokens or --max-num-seqs" in message


def test_small_devices_keep_a_gibibyte() -> None:
    assert device(total=8).reserve_bytes == GIB
