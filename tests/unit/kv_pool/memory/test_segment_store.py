"""The memory of a pool, made on a thread of its own."""

import os
from pathlib import Path

import pytest

from baton.kv.blocks import KVLayout
from kv_pool.memory.segment_store import make_store

LAYOUT = KVLayout(2, 2, 8, 16, "float32")


async def test_it_is_made_by_a_thread_that_may_not_change_its_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    store = await make_store(tmp_path, 1 << 20, LAYOUT, lambda: True)
    store.close()
