"""Describes degraded service to operators: notices, warnings and degradation steps."""

from collections.abc import Iterator

from baton.pb import cluster_pb2 as pb
from coordinator.core.admission.degradation import DegradationController, DegradationStep
from coordinator.core.brain import Brain

_STEP_EFFECTS = {
    DegradationStep.SHED_LOWEST: "new requests of the lowest class are refused",
    DegradationStep.SMALLER_TOKEN_BUDGET: "tenants with tokens_per_second get half of it",
    DegradationStep.CAPPED_OUTPUT: "new requests get at most --degraded-max-tokens tokens",
    DegradationStep.LOCAL_PREFILL_ONLY: (
        "hand-offs fail and are given up: decode nodes compute every prompt"
    ),
}


def list_notices(brain: Brain) -> list[str]:
    """Return one sentence for each way in which service is degraded at the moment."""
    found = [
        f"degraded ({step.value}): {_STEP_EFFECTS[step]}" for step in brain.degradation.active_steps
    ]
    if brain.why_no_prefill():
        found.append("no prefill node serves: decode nodes compute every prompt")
    return found


def drain_warning(brain: Brain) -> str:
    """Describe what is missing while nodes are drained; "" if nothing is."""
    if missing := brain.why_not_serving():
        return f"{missing}: requests wait, and new ones get 503, until one serves"
    missing = brain.why_no_prefill()
    return f"{missing}: decode nodes compute every prompt until one serves" if missing else ""


def degradation_to_pb(
    degradation: DegradationController, now: float
) -> Iterator[pb.DegradationStep]:
    """Yield every step, in the order in which the steps are taken."""
    for step in DegradationStep:
        since = degradation.active_steps.get(step)
        yield pb.DegradationStep(
            step=step.value,
            active=since is not None,
            seconds=0.0 if since is None else now - since,
            cannot_help=""
            if since is not None
            else degradation.last_sample.unhelpful_steps.get(step, ""),
        )
