"""Which blocks are copied between the two arenas of a GPU node, and when. No kernel runs here."""

import pytest
import torch

pytest.importorskip("triton")

from baton.types import BlockIndex
from node_engine.model.gpu import device_cache
from node_engine.model.gpu.device_cache import DeviceCache


def copy_rows(source: torch.Tensor, target: torch.Tensor, blocks: torch.Tensor) -> None:
    target[blocks.long()] = source[blocks.long()]


def test_a_block_that_others_wrote_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device has computed in it since is not overwritten."""
    monkeypatch.setattr(device_cache, "copy_blocks_between", copy_rows)
    host = torch.ones(4, 1, 2, 1, 4, 4)
    cache = DeviceCache(host)
    cache.mark_host_written([BlockIndex(2)])
    cache.load_marked_blocks()
    assert cache.cache.arena[:, 0, 0, 0, 0, 0].tolist() == [0, 0, 1, 0, 0]
    cache.cache.arena[2] = 3.0  # a step has computed it anew
    cache.mark_host_written([BlockIndex(1)])
    cache.load_marked_blocks()
    assert cache.cache.arena[:, 0, 0, 0, 0, 0].tolist() == [0, 1, 3, 0, 0]
    cache.save_blocks([BlockIndex(2)])
    assert host[:, 0, 0, 0, 0, 0].tolist() == [1, 1, 3, 1]


class BegunLoads:
    """Stands in for SideCopies: loads end when they are waited for."""

    def __init__(self) -> None:
        self.loading: frozenset[BlockIndex] = frozenset()
        self.num_waits = 0

    def find_loading_blocks(self) -> frozenset[BlockIndex]:
        return self.loading

    def wait_for_loads(self) -> None:
        self.num_waits += 1
        self.loading = frozenset()


def test_a_block_that_a_peer_will_write_is_not_loaded_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its load was for a sequence that has ended before the next step."""
    monkeypatch.setattr(device_cache, "copy_blocks_between", copy_rows)
    cache = DeviceCache(torch.ones(4, 1, 2, 1, 4, 4))
    cache.mark_host_written([BlockIndex(1), BlockIndex(2)])
    cache.void_loads([BlockIndex(2), BlockIndex(3)])
    cache.cache.arena[2] = 3.0  # the peer has written it
    cache.load_marked_blocks()
    assert cache.cache.arena[:, 0, 0, 0, 0, 0].tolist() == [0, 1, 3, 0, 0]


def test_loads_of_other_blocks_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, copies = DeviceCache(torch.ones(4, 1, 2, 1, 4, 4)), BegunLoads()
    monkeypatch.setattr(cache, "_side_copies", copies)
    copies.loading = frozenset({BlockIndex(0), BlockIndex(1)})
    cache.void_loads([BlockIndex(2)])
    assert copies.num_waits == 0
    cache.void_loads([BlockIndex(1), BlockIndex(2)])
    assert copies.num_waits == 1
