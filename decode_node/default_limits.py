"""How much a decode node computes in one step, by its device, unless the settings say otherwise.

A node that switches to the other role keeps the limits with which it started. The figures for GPUs
are estimates: other limits have not been measured against them.
"""

from collections.abc import Mapping

from node_engine.core.scheduling.step_limits import DeviceType, StepLimits

DECODE_LIMITS: Mapping[DeviceType, StepLimits] = {
    # In colocated mode a prompt chunk makes the sequences that run beside it wait. A quarter of a
    # second is a pause that a reader hardly sees, and long enough for chunks at nearly full rate.
    "cpu": StepLimits(max_num_seqs=64, max_batched_tokens=512, max_step_seconds=0.25),
    # Decoding reads all weights in every step, whatever the number of sequences: many slots. In
    # colocated mode prompts are computed beside running sequences, which wait for the whole step:
    # fewer tokens than in a prefill node.
    "cuda": StepLimits(max_num_seqs=256, max_batched_tokens=2048),
}
