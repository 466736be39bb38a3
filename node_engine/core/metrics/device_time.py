"""Device seconds per phase and tenant class; they add up to the time that the device was busy.

The time of a step is divided equally among its tokens. This is accurate for a compute-bound step;
in a memory-bound step it charges prompts more than they add to it.
"""

from collections import defaultdict
from collections.abc import Mapping

from node_engine.core.sequences.sequence import Sequence
from node_engine.core.step.step_batch import SequenceId, StepBatch


class DeviceTime:
    """Counts the seconds that the device was busy."""

    def __init__(self) -> None:
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)  # (phase, class)
        self.busy_seconds = 0.0

    def charge_step(
        self, batch: StepBatch, sequences: Mapping[SequenceId, Sequence], seconds: float
    ) -> None:
        """Charge the `seconds` of a step, successful or not, to the classes of its sequences.

        Computing a context counts as prefill and is charged to the class that made it necessary.
        """
        self.busy_seconds += seconds
        for slice_ in batch.slices:
            sequence = sequences[slice_.sequence_id]
            share = seconds * len(slice_.token_ids) / batch.num_tokens
            if slice_.start < sequence.context_len:
                self._seconds["prefill", sequence.charged_class_at(slice_.start)] += share
            else:
                self._seconds["decode", sequence.tenant_class] += share

    def counters(self) -> dict[str, float]:
        """Prometheus counters, as a node reports them."""
        counters = {
            f'baton_device_seconds_total{{phase="{phase}",class="{tenant_class}"}}': seconds
            for (phase, tenant_class), seconds in self._seconds.items()
        }
        return counters | {"baton_device_busy_seconds_total": self.busy_seconds}
