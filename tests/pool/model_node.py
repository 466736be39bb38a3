"""A model over an arena and a pool's segment, without a process: what a node computes from pool
blocks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from baton.kv.blocks import HashChain, root_hash
from baton.shared_memory.addressing import BlockAddressSpace
from baton.shared_memory.segment import create_segment, round_up_segment_bytes
from baton.types import AttemptKey, AttemptSpec, BlockIndex, Request, RequestId, SamplingParams
from node_engine.core.blocks.block_pool import BlockPool, PartialHit
from node_engine.core.blocks.pool_prefix import PoolPrefix, RefCountedPin
from node_engine.core.scheduling.capacity import SchedulerLimits
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.sequences.outcomes import TokenEmitted
from node_engine.model.model_loader import load_model_engine
from node_engine.shared_pool.pool_client import BlockCopier

BLOCKS = 64


class ModelNode:
    """A node; without `in_place`, blocks of the pool are copied, as for a GPU."""

    def __init__(
        self, model: Path, folder: Path, device: Literal["cpu", "cuda"], *, in_place: bool
    ) -> None:
        self.engine = load_model_engine(model, dtype="float32", device=device)
        layout = self.engine.layout
        size = round_up_segment_bytes(BLOCKS * layout.block_bytes, layout.block_bytes)
        self.arena, self.pool_segment = (
            create_segment(folder, "arena", size),
            create_segment(folder, "pool", size),
        )
        space = BlockAddressSpace(layout.block_bytes, folder, range_bytes=1 << 30)
        self.mapped = (
            space.attach_segment(self.arena.name),
            space.attach_segment(self.pool_segment.name),
        )
        self.first_pool_block = space.address_map.get_span(self.pool_segment.name).start
        self.copies = BlockCopier(space.view_range(), layout.block_bytes)
        own = self.arena.view[
            : BLOCKS * layout.block_bytes
        ]  # without what the segment's size was rounded up by
        self.engine.bind_cache(space.view_range() if in_place else own, BLOCKS)
        self.pool = BlockPool(BLOCKS, layout.block_size, lambda: 0.0)
        limits = SchedulerLimits(4, 64, 2048)
        self.scheduler = Scheduler(
            self.pool, limits, copy_pool_blocks=None if in_place else self._copy_pool_blocks
        )
        self.num_released = 0

    def generate(
        self, prompt: Sequence[int], count: int, pooled: PoolPrefix | None = None
    ) -> list[int]:
        key = AttemptKey(RequestId("r"), 0, 0)
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        root = root_hash(self.engine.model_digest, self.engine.layout, b"")
        sequence = self.scheduler.add_sequence(
            AttemptSpec(key, Request(key.request_id, tuple(prompt), params, 60.0)),
            root,
            pool_prefix=pooled,
        )
        if pooled is not None:
            pooled.release()
        tokens: list[int] = []
        while (batch := self.scheduler.schedule_step().batch) is not None:
            outcomes = self.scheduler.update_from_results(batch, self.engine.run(batch))
            tokens += [
                outcome.event.token_id for outcome in outcomes if isinstance(outcome, TokenEmitted)
            ]
        self.num_pool_tokens = sequence.pool_use.num_tokens
        return tokens

    def publish_and_wipe(self, prompt: Sequence[int], blocks: int, partial: int) -> PoolPrefix:
        """Publish the blocks that `generate` has left for the prompt, and overwrite the node's
        own blocks."""
        layout = self.engine.layout
        chain = HashChain(
            root_hash(self.engine.model_digest, layout, b""), prompt, layout.block_size
        )
        mine = self.pool.find_own_suffix(chain, blocks + (1 if partial else 0))
        places = [BlockIndex(self.first_pool_block + number) for number in range(len(mine))]
        self.engine.save_blocks(mine).result()
        self.copies.copy_blocks(list(zip(mine, places, strict=True)))
        for block in map(BlockIndex, range(BLOCKS)):
            if block in self.pool.prefix_index:
                self.pool.unindex_block(block)
        self.arena.view[:] = bytes(len(self.arena.view))
        self.engine.load_blocks([BlockIndex(block) for block in range(BLOCKS)])
        beginning = PartialHit(places[blocks], partial) if partial else None
        return PoolPrefix(tuple(places[:blocks]), beginning, RefCountedPin(self._release))

    def _copy_pool_blocks(self, copies: Sequence[tuple[BlockIndex, BlockIndex]]) -> None:
        self.copies.copy_blocks(copies)
        self.engine.load_blocks([target for _, target in copies])

    def _release(self) -> None:
        self.num_released += 1


def check_reads(
    model: Path,
    folder: Path,
    device: Literal["cpu", "cuda"],
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    in_place: bool,
) -> None:
    """Check tokens from whole pool blocks, and from one more that is continued by copy on write."""
    size = 16
    for blocks, partial in ((1, 0), (3, 0), (2, size - 3), (len(prompt) // size - 1, size - 1)):
        node = ModelNode(model, folder, device, in_place=in_place)
        assert node.generate(prompt, len(answer)) == list(answer)
        pooled = node.publish_and_wipe(prompt, blocks, partial)
        assert node.generate(prompt, len(answer), pooled) == list(answer)
        assert node.num_pool_tokens == blocks * size + partial
        assert node.num_released == 1
        node.arena.close()
        node.pool_segment.close()
