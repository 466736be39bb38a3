"""One sequence on a paced engine without a node."""

from baton.kv.blocks import KVLayout
from baton.types import BlockIndex, SamplingParams
from node_engine.core.step.step_batch import (
    SampleSpec,
    SequenceId,
    SequenceSlice,
    StepBatch,
)
from node_engine.paced.costs import ZERO_COSTS
from node_engine.paced.paced_engine import PACED_LAYOUT, PacedEngine
from tests.unit.node_engine.core.stepped_node import VOCAB

SIZE = PACED_LAYOUT.block_size


PROMPT = [(13 * position) % 983 + 1 for position in range(100)]


class PacedBench:
    """One sequence on a bare engine: blocks 0.. of a small arena in order."""

    def __init__(
        self,
        num_blocks: int = 8,
        *,
        layout: KVLayout = PACED_LAYOUT,
        eos_token_ids: tuple[int, ...] = (0,),
        eos_probability: float = 0.0,
        reread: bool = False,
    ) -> None:
        self.engine = PacedEngine(
            ZERO_COSTS,
            layout=layout,
            vocab_size=VOCAB,
            eos_token_ids=eos_token_ids,
            eos_probability=eos_probability,
            reread=reread,
        )
        self.arena = bytearray(num_blocks * self.engine.layout.block_bytes)
        self.engine.bind_cache(memoryview(self.arena), num_blocks)
        self.table = [BlockIndex(block) for block in range(num_blocks)]

    def slice(
        self,
        tokens: list[int],
        start: int,
        sequence: int = 0,
        table: list[BlockIndex] | None = None,
    ) -> SequenceSlice:
        sample = SampleSpec(SamplingParams(9), 0, start + len(tokens))
        return SequenceSlice(
            SequenceId(sequence), tuple(tokens), start, table or self.table, sample
        )

    def run(
        self,
        tokens: list[int],
        start: int,
        sequence: int = 0,
        table: list[BlockIndex] | None = None,
    ) -> int:
        [made] = self.engine.run(StepBatch((self.slice(tokens, start, sequence, table),)))
        assert made.token_id is not None
        return made.token_id
