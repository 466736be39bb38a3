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
