"""What engines that compute in the host's cache memory have in common."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from baton.types import BlockIndex
from node_engine.core.step.engine import CacheLimits, make_completed_save
from node_engine.core.step.step_batch import StepBatch
from node_engine.model.common.base_engine import BaseEngine
from node_engine.model.common.warm_up import CPU_PROMPT_LENGTHS, iter_warm_up_steps


class HostMemoryEngine(BaseEngine):
    """An `Engine` whose steps compute in the arena itself: it copies no blocks."""

    _num_blocks = 0

    @property
    def cache_limits(self) -> CacheLimits:
        return CacheLimits()

    def load_blocks(self, blocks: Sequence[BlockIndex]) -> None:
        """Steps compute in the arena itself."""

    def save_blocks(self, blocks: Sequence[BlockIndex]) -> Future[None]:
        """Steps compute in the arena itself."""
        return make_completed_save()

    def warm_up(
        self, max_batched_tokens: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Run steps of typical sizes in the empty cache; see Engine.warm_up."""
        for step in self._iter_warm_up_steps(max_batched_tokens):
            if not is_wanted():
                return
            self.run(step)

    def _iter_warm_up_steps(self, max_batched_tokens: int) -> Iterable[StepBatch]:
        cache = self._layout.block_size, self._num_blocks
        return iter_warm_up_steps(
            CPU_PROMPT_LENGTHS, *cache, self._max_model_len, max_batched_tokens
        )
