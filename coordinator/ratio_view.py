"""The ratio, its target and the changes of role under way, as operators are told."""

from baton.pb import cluster_pb2 as pb
from baton.ratio import told
from coordinator.core.brain import Brain
from coordinator.core.messages import Switched


def ratio_to_pb(brain: Brain, now: float) -> pb.Ratio:
    switches = brain.switches
    have, target = switches.split(), switches.target
    answer = pb.Ratio(
        prefill=have.prefill,
        decode=have.decode,
        has_target=target is not None,
        generation=switches.generation,
        settled=switches.settled,
        possible=told(switches.possible(now)),
        over=[_switch(report, 0) for report in switches.over],
    )
    if target is not None:
        answer.target_prefill, answer.target_decode = target.prefill, target.decode
    for flip in switches.flips.values():
        answer.switches.append(_switch(flip.report(flip.phase.value, now), brain.placed_on(flip.incarnation)))
    return answer


def _switch(report: Switched, placed: int) -> pb.RoleSwitch:
    return pb.RoleSwitch(
        node=report.node,
        from_role=report.source.value,
        to_role=report.to.value,
        phase=report.outcome,
        drain_seconds=report.drain,
        switch_seconds=report.switch,
        probe_seconds=report.probe,
        detail=report.detail,
        generation=report.generation,
        placed=placed,
    )
