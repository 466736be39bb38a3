"""Where the device's time went: seconds per phase and tenant class, which add up to the time that
it was busy.

A step's time is divided by its tokens. That is what a token costs when a step is bound by
arithmetic; for a step bound by memory it charges prompts, which come many at a time, more than they
add to it.
"""

from collections import defaultdict
from collections.abc import Callable

from node_engine.core.sequences.sequence import Sequence
from node_engine.core.step.step_batch import SequenceId, StepBatch


class DeviceTime:
    def __init__(self) -> None:
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)  # phase, class
        self.busy_seconds = 0.0

    def charge_step(
        self, batch: StepBatch, sequence_of: Callable[[SequenceId], Sequence], seconds: float
    ) -> None:
        """A step took `seconds`, whether it succeeded or not. Computing a context is prefill, and
        is charged to whoever made it necessary."""
        self.busy_seconds += seconds
        for piece in batch.slices:
            sequence = sequence_of(piece.sequence_id)
            share = seconds * len(piece.token_ids) / batch.num_tokens
            if piece.start < sequence.context_len:
                self._seconds["prefill", sequence.charged_class_at(piece.start)] += share
            else:
                self._seconds["decode", sequence.tenant_class] += share

    def counters(self) -> dict[str, float]:
        """As a node reports them."""
        found = {
            f'baton_device_seconds_total{{phase="{phase}",class="{tenant_class}"}}': seconds
            for (phase, tenant_class), seconds in self._seconds.items()
        }
        return found | {"baton_device_busy_seconds_total": self.busy_seconds}
