"""A draft model for tests: the paced engine, with errors, costs and failures as wanted."""

import random
from collections.abc import Sequence

from baton.process.clock import FakeClock
from node_engine.core.speculation.model_drafter import ModelDrafter
from node_engine.core.step.step_batch import SliceResult, StepBatch
from node_engine.paced.costs import ZERO_COSTS
from node_engine.paced.paced_engine import PacedEngine


class PacedDraftModel:
    """Computes each token from the KV that it reads; it is wrong with the share `error_share`."""

    def __init__(
        self,
        vocab_size: int,
        *,
        num_blocks: int = 64,
        error_share: float = 0.0,
        seconds_per_step: float = 0.0,
        seconds_per_token: float = 0.0,
        max_model_len: int = 4096,
        seed: int = 0,
    ) -> None:
        self.batches: list[StepBatch] = []
        self.error_share = error_share
        self.seconds_per_step = seconds_per_step
        self._seconds_per_token = seconds_per_token
        self.is_broken = False
        self.num_blocks = num_blocks
        self._clock = FakeClock()
        self._dice = random.Random(seed)
        self._engine = PacedEngine(ZERO_COSTS, vocab_size=vocab_size, clock=self._clock)
        self._arena = bytearray(num_blocks * self._engine.layout.block_bytes)
        self._engine.bind_cache(memoryview(self._arena), num_blocks)
        self._vocab_size = vocab_size
        self.drafter = ModelDrafter(
            self._run_step,
            num_blocks=num_blocks,
            block_size=self._engine.layout.block_size,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            clock=self._clock,
        )

    def _run_step(self, batch: StepBatch) -> Sequence[SliceResult] | None:
        self.batches.append(batch)
        self._clock.advance(self.seconds_per_step + self._seconds_per_token * batch.num_tokens)
        if self.is_broken:
            return None
        return [self._make_errors(result) for result in self._engine.run(batch)]

    def _make_errors(self, result: SliceResult) -> SliceResult:
        if result.token_id is None or self._dice.random() >= self.error_share:
            return result
        return result._replace(token_id=(result.token_id + 1) % self._vocab_size)

    def assert_nothing_is_held(self) -> None:
        self.drafter.release_ended_sequences()
        assert self.drafter.num_free_blocks == self.num_blocks
