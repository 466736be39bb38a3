"""Device seconds per phase and tenant class; they add up to the time that the device was busy.

The time of a step is divided equally among its tokens. This is accurate for a compute-bound step;
in a memory-bound step it charges prompts more than they add to it.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import cache

from node_engine.core.sequences.sequence import Sequence
from node_engine.core.step.step_batch import SequenceId, StepBatch


class DeviceTime:
    """Counts the seconds that the device was busy."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by counter
        self.busy_seconds = 0.0

    def charge_step(
        self, batch: StepBatch, sequences: Mapping[SequenceId, Sequence], seconds: float
    ) -> None:
        """Charge the `seconds` of a step, successful or not, to the classes of its sequences.

        Computing a context counts as prefill and is charged to the class that made it necessary.
        """
        self.busy_seconds += seconds
        seconds_per_token = seconds / batch.num_tokens if batch.slices else 0.0
        for slice_ in batch.slices:
            sequence = sequences[slice_.sequence_id]
            share = seconds_per_token * len(slice_.token_ids)
            if slice_.start < sequence.context_len:
                charged_class = sequence.charged_class_at(slice_.start)
                self._seconds[_counter_name("prefill", charged_class)] += share
            else:
                self._seconds[_counter_name("decode", sequence.tenant_class)] += share

    def counters(self) -> dict[str, float]:
        """Prometheus counters, as a node reports them."""
        return self._seconds | {"baton_device_busy_seconds_total": self.busy_seconds}


@cache  # of a few classes, which operators name
def _counter_name(phase: str, tenant_class: str) -> str:
    return f'baton_device_seconds_total{{phase="{phase}",class="{tenant_class}"}}'
