"""The ratio as text, for `baton ratio`, `baton status` and `baton top`."""

from baton.pb.cluster_pb2 import Ratio, RoleSwitch

_PHASE_WORDS = {
    "done": "verified",
    "recalled": "called back before it had left its role",
    "superseded": "wanted back before it counted",
    "lost": "not done",
}


def format_ratio(ratio: Ratio) -> str:
    current = f"ratio {ratio.prefill}:{ratio.decode}"
    if not ratio.has_target:
        return f"{current}, as the nodes have joined"
    target = f"{ratio.target_prefill}:{ratio.target_decode}"
    if ratio.settled:
        return f"{current}, as requested"
    under_way = len(ratio.switches)
    missing = (
        f"{under_way} on their way"
        if under_way
        else "waiting for nodes to come back or into service"
    )
    return f"{current}, {target} is asked for: {missing}"


def format_role_switch(switch: RoleSwitch) -> str:
    """Return one line about a role switch, with the seconds of each phase so far."""
    seconds = (
        f"drain {switch.drain_seconds:.2f} s, switch {switch.switch_seconds:.2f} s, "
        f"probe {switch.probe_seconds:.2f} s"
    )
    state = _PHASE_WORDS.get(switch.phase, switch.phase)
    placed = f", {switch.placed} requests left" if switch.placed else ""
    detail = f" ({switch.detail})" if switch.detail else ""
    return (
        f"{switch.node}: {switch.from_role} -> {switch.to_role}: {state}{detail}: {seconds}{placed}"
    )


def format_ratio_control(ratio: Ratio) -> str:
    """Say who changes the ratio, and why it is what it is."""
    served = f"; {ratio.good} of {ratio.ended} within it in the last minute" if ratio.ended else ""
    return (
        f"automatic, for {ratio.slo}{served}: {ratio.reason}" if ratio.automatic else ratio.reason
    )


def format_ratio_progress(ratio: Ratio) -> str:
    """Return one line about the ratio and the role switches that are under way."""
    steps = ", ".join(f"{switch.node} {switch.phase}" for switch in ratio.switches)
    return f"{format_ratio(ratio)} {f'({steps})' if steps else ''}".rstrip()
