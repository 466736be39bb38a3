"""Logs the changes that the brain reports for the log: retries, breakers, degradation and roles."""

from baton.process import log
from coordinator.core.common.effects import (
    AttemptReplaced,
    BreakerChanged,
    DegradationChanged,
    RatioChanged,
    RoleSwitchReport,
)

_log = log.get_logger("dispatcher")


def log_role_switch(switch: RoleSwitchReport) -> None:
    seconds = {
        "drain": switch.drain_seconds,
        "switch": switch.switch_seconds,
        "probe": switch.probe_seconds,
    }
    roles = f"{switch.source_role.value} to {switch.target_role.value}"
    _log.info(
        "role switch ended",
        node=switch.node,
        roles=roles,
        outcome=switch.outcome,
        why=switch.detail,
        **seconds,
    )


def log_change(
    effect: AttemptReplaced | BreakerChanged | DegradationChanged | RatioChanged,
) -> None:
    match effect:
        case AttemptReplaced(key, reason):
            _log.info(
                "attempt replaced",
                request=key.request_id,
                attempt=key.attempt_number,
                reason=reason,
            )
        case BreakerChanged(prefill, decode, state):
            _log.warning(
                "circuit breaker of a node pair changed",
                state=state.value,
                prefill_node=prefill,
                decode_node=decode,
            )
        case DegradationChanged(step, taken, pressure):
            event = "service degraded" if taken else "service restored"
            _log.warning(event, step=step, pressure=pressure)
        case RatioChanged(target, reason):
            _log.info("ratio changed", target=str(target), why=reason)
