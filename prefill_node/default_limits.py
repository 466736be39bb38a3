"""How much a prefill node computes in one step, by its device, unless the settings say otherwise.

A node that switches to the other role keeps the limits with which it started. The figures for GPUs
are estimates: other limits have not been measured against them.
"""

from collections.abc import Mapping

from node_engine.core.scheduling.step_limits import DeviceType, StepLimits

PREFILL_LIMITS: Mapping[DeviceType, StepLimits] = {
    # A CPU computes at its full rate with a few hundred tokens. Shorter steps let short prompts
    # overtake long ones sooner, and hand the first blocks over sooner. Sequences run here only
    # after a switch to the decode role: the bound of their steps is that of a decode node.
    "cpu": StepLimits(max_num_seqs=64, max_batched_tokens=512, max_step_seconds=0.25),
    # A GPU needs thousands of tokens to be bound by arithmetic and not by launches and by reading
    # the weights. No running sequence waits for a step of a prefill node. It has the slots of a
    # decode node, which it may become.
    "cuda": StepLimits(max_num_seqs=256, max_batched_tokens=4096),
}
