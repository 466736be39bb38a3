"""A model over an arena beside a pool's segment, without a process: what a node computes from blocks of the pool."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from baton.addressing import AddressSpace
from baton.block_hash import root_hash
from baton.hash_chain import HashChain
from baton.segment import create, segment_bytes
from baton.types import AttemptKey, BlockIndex, Request, RequestId, SamplingParams, Work
from node_engine.core.block_pool import BlockPool, PartialHit
from node_engine.core.outcome import Emitted
from node_engine.core.pooled import Pooled, PoolHold
from node_engine.core.scheduler import Scheduler, SchedulerLimits
from node_engine.host.block_copies import BlockCopies
from node_engine.model.engine import ModelEngine

BLOCKS = 64


class ModelNode:
    """`in_place` false: blocks of the pool are copied, as for a GPU."""

    def __init__(self, model: Path, folder: Path, device: Literal["cpu", "cuda"], *, in_place: bool) -> None:
        self.engine = ModelEngine.load(model, dtype="float32", device=device)
        layout = self.engine.layout
        size = segment_bytes(BLOCKS * layout.block_bytes, layout.block_bytes)
        self.arena, self.shared = create(folder, "arena", size), create(folder, "pool", size)
        space = AddressSpace(layout.block_bytes, folder, range_bytes=1 << 30)
        self.mapped = space.attach(self.arena.name), space.attach(self.shared.name)
        self.start = space.map.span(self.shared.name).start
        self.copies = BlockCopies(space.view(), layout.block_bytes)
        own = self.arena.view[: BLOCKS * layout.block_bytes]  # without what the segment's size was rounded up by
        self.engine.bind(space.view() if in_place else own, BLOCKS)
        self.pool = BlockPool(BLOCKS, layout.block_size, lambda: 0.0)
        limits = SchedulerLimits(4, 64, 2048)
        self.scheduler = Scheduler(self.pool, limits, copy_in=None if in_place else self.copies.copy)
        self.released = 0

    def generate(self, prompt: Sequence[int], count: int, pooled: Pooled | None = None) -> list[int]:
        key = AttemptKey(RequestId("r"), 0, 0)
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        root = root_hash(self.engine.model_digest, self.engine.layout, b"")
        sequence = self.scheduler.add(Work(key, Request(key.request, tuple(prompt), params, 60.0)), root, pooled=pooled)
        if pooled is not None:
            pooled.done()
        tokens: list[int] = []
        while (batch := self.scheduler.next_step().batch) is not None:
            outcomes = self.scheduler.update(batch, self.engine.run(batch))
            tokens += [each.event.token for each in outcomes if isinstance(each, Emitted)]
        self.num_pooled = sequence.num_pooled
        return tokens

    def publish_and_forget(self, prompt: Sequence[int], blocks: int, partial: int) -> Pooled:
        """Blocks that a former `generate` of the same prompt has left here go to the pool; the own ones are wiped."""
        layout = self.engine.layout
        chain = HashChain(root_hash(self.engine.model_digest, layout, b""), prompt, layout.block_size)
        mine = self.pool.own_run(chain, blocks + (1 if partial else 0))
        places = [BlockIndex(self.start + number) for number in range(len(mine))]
        self.copies.copy(list(zip(mine, places, strict=True)))
        for block in map(BlockIndex, range(BLOCKS)):
            if block in self.pool.index:
                self.pool.forget(block)
        self.arena.view[:] = bytes(len(self.arena.view))
        beginning = PartialHit(places[blocks], partial) if partial else None
        return Pooled(tuple(places[:blocks]), beginning, PoolHold(self._release))

    def _release(self) -> None:
        self.released += 1


def check_reads(
    model: Path,
    folder: Path,
    device: Literal["cpu", "cuda"],
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    in_place: bool,
) -> None:
    """Tokens from whole blocks of the pool, and from one more that is continued by copy on write."""
    size = 16
    for blocks, partial in ((1, 0), (3, 0), (2, size - 3), (len(prompt) // size - 1, size - 1)):
        node = ModelNode(model, folder, device, in_place=in_place)
        assert node.generate(prompt, len(answer)) == list(answer)
        pooled = node.publish_and_forget(prompt, blocks, partial)
        assert node.generate(prompt, len(answer), pooled) == list(answer)
        assert node.num_pooled == blocks * size + partial
        assert node.released == 1
        node.arena.close()
        node.shared.close()
