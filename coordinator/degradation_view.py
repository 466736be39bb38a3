"""What operators are told of service that is not as they ordered it."""

from collections.abc import Iterator

from baton.pb import cluster_pb2 as pb
from coordinator.core.brain import Brain
from coordinator.core.degradation import Degradation, Step

_TAKEN = {
    Step.SHED_LOWEST: "new requests of the lowest class are refused",
    Step.SMALLER_TOKEN_BUDGET: "tenants with tokens_per_second get half of it",
    Step.CAPPED_OUTPUT: "new requests get at most --degraded-max-tokens tokens",
    Step.LOCAL_PREFILL_ONLY: "hand-offs fail and are given up: decode nodes compute every prompt",
}


def notices(brain: Brain) -> list[str]:
    """Sentences; none while all is as it should be."""
    found = [f"degraded ({step.value}): {_TAKEN[step]}" for step in brain.degradation.active]
    if brain.missing_prefill():
        found.append("no prefill node serves: decode nodes compute every prompt")
    return found


def drain_warning(brain: Brain) -> str:
    """What service lacks while nodes are drained; "" if it lacks nothing."""
    if missing := brain.missing():
        return f"{missing}: requests wait, and new ones get 503, until one serves"
    missing = brain.missing_prefill()
    return f"{missing}: decode nodes compute every prompt until one serves" if missing else ""


def degradation_to_pb(degradation: Degradation, now: float) -> Iterator[pb.DegradationStep]:
    """Every step, in the order in which they are taken."""
    for step in Step:
        since = degradation.active.get(step)
        yield pb.DegradationStep(
            step=step.value,
            active=since is not None,
            seconds=0.0 if since is None else now - since,
            cannot_help="" if since is not None else degradation.last.cannot_help.get(step, ""),
        )
