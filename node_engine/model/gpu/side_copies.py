"""Copies of blocks between both arenas of a GPU node, beside the steps that it computes.

Copies run on streams of their own, so that a step neither waits for the copies of other sequences
nor delays them. A thread waits for the end of copies to the host, so that nobody else has to.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from baton.types import BlockIndex
from kv_kernels.triton.block_copy import copy_blocks_between
from node_engine.model.common.base_engine import translate_device_errors


@dataclass(frozen=True, slots=True)
class _Load:
    blocks: frozenset[BlockIndex]
    ended: torch.cuda.Event


class SideCopies:
    """Loads and saves blocks. Compute thread only; futures are completed on another thread."""

    def __init__(self) -> None:
        self._load_stream, self._save_stream = torch.cuda.Stream(), torch.cuda.Stream()
        self._loads: list[_Load] = []
        self._saves: SimpleQueue[tuple[torch.cuda.Event, Future[None]]] = SimpleQueue()
        self._waiter: threading.Thread | None = None

    def load_blocks(
        self,
        host: torch.Tensor,
        device: torch.Tensor,
        blocks: torch.Tensor,  # int32 [n]
        numbers: Sequence[BlockIndex],  # the same
    ) -> None:
        """Copy blocks to the device, after the steps that are launched already: these may still
        write to blocks that had another owner."""
        self._load_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._load_stream):
            copy_blocks_between(host, device, blocks)
            ended = torch.cuda.Event()
            ended.record()
        blocks.record_stream(self._load_stream)
        self._loads.append(_Load(frozenset(numbers), ended))

    def find_loading_blocks(self) -> frozenset[BlockIndex]:
        """The blocks whose copies to the device have not ended."""
        self._loads = [load for load in self._loads if not load.ended.query()]
        return frozenset().union(*(load.blocks for load in self._loads))

    def wait_for_loads(self) -> None:
        """Let what is launched from now on wait for the loads."""
        for load in self._loads:
            torch.cuda.current_stream().wait_event(load.ended)
        self._loads.clear()

    def save_blocks(
        self,
        device: torch.Tensor,
        host: torch.Tensor,
        blocks: torch.Tensor,  # int32 [n]
    ) -> Future[None]:
        """Copy blocks to the host; the future is completed, on another thread, when they are there.

        Its error is DeviceLost if the device fails.
        """
        self._save_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._save_stream):
            copy_blocks_between(device, host, blocks)
            ended = torch.cuda.Event(blocking=True)
            ended.record()
        blocks.record_stream(self._save_stream)
        saved: Future[None] = Future()
        self._saves.put((ended, saved))
        if self._waiter is None:
            self._waiter = threading.Thread(
                target=self._complete_saves, name="kv-saves", daemon=True
            )
            self._waiter.start()
        return saved

    def _complete_saves(self) -> None:
        while True:
            ended, saved = self._saves.get()
            try:
                with translate_device_errors():
                    ended.synchronize()
            except Exception as error:
                saved.set_exception(error)
            else:
                saved.set_result(None)
