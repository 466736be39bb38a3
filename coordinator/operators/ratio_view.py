"""The ratio, its target, the changes of role under way and advice on it, as operators are told."""

from baton.pb import cluster_pb2 as pb
from baton.role_split import format_splits
from baton.types import Role
from coordinator.core.brain import Brain
from coordinator.core.common.messages import RoleSwitchReport
from coordinator.core.ratio.controller import RatioReport
from coordinator.core.ratio.split_forecast import SplitForecast


def ratio_to_pb(brain: Brain, now: float) -> pb.Ratio:
    switches = brain.role_switcher
    have, target, pilot = switches.current_split(), switches.target_split, brain.ratio_controller
    service = pilot.get_slo_results(now)
    answer = pb.Ratio(
        prefill=have.prefill_nodes,
        decode=have.decode_nodes,
        has_target=target is not None,
        generation=switches.target_generation,
        settled=switches.is_settled,
        possible=format_splits(switches.list_possible_splits(now)),
        over=[_role_switch_to_pb(report, 0) for report in switches.finished],
        automatic=pilot.is_automatic,
        slo=str(pilot.target_slo),
        reason=pilot.reason,
        ended=service.ended_requests,
        good=service.good_requests,
    )
    if target is not None:
        answer.target_prefill, answer.target_decode = target.prefill_nodes, target.decode_nodes
    for flip in switches.pending.values():
        answer.switches.append(
            _role_switch_to_pb(
                flip.build_report(flip.phase.value, now), brain.count_attempts(flip.incarnation)
            )
        )
    return answer


def advice_to_pb(report: RatioReport, queued: int) -> pb.RatioAdvice:
    advice, asked, service, stages = (
        report.advice,
        report.workload,
        report.slo_results,
        report.stage_seconds,
    )
    return pb.RatioAdvice(
        slo=str(advice.slo),
        prefill=advice.best_split.prefill_nodes,
        decode=advice.best_split.decode_nodes,
        present_prefill=advice.current_split.prefill_nodes,
        present_decode=advice.current_split.decode_nodes,
        reason=advice.reason,
        forecasts=[_forecast_to_pb(one) for one in advice.forecasts],
        seconds=asked.window_seconds,
        requests_per_second=asked.requests_per_second,
        burstiness=asked.burstiness,
        prompt_tokens_mean=asked.prompt_moments.mean,
        prompt_tokens_deviation=asked.prompt_moments.stddev,
        output_tokens_mean=asked.output_moments.mean,
        output_tokens_deviation=asked.output_moments.stddev,
        computed_share=asked.computed_share,
        prefill_tokens_per_second=asked.prefill_tokens_per_second,
        decode_tokens_per_second=asked.decode_tokens_per_second,
        queue_seconds=stages.queue,
        prefill_seconds=stages.prefill,
        transfer_seconds=stages.transfer,
        queued=queued,
        waiting_prefill=report.waiting_by_role[Role.PREFILL],
        waiting_decode=report.waiting_by_role[Role.DECODE],
        ended=service.ended_requests,
        good=service.good_requests,
    )


def _forecast_to_pb(one: SplitForecast) -> pb.SplitForecast:
    return pb.SplitForecast(
        prefill=one.split.prefill_nodes,
        decode=one.split.decode_nodes,
        ttft_p50=one.ttft_p50,
        ttft_p90=one.ttft_p90,
        ttft_p99=one.ttft_p99,
        tpot=one.tpot_mean,
        share=one.slo_attainment,
        goodput=one.goodput,
        prefill_load=one.prefill_load,
        decode_load=one.decode_load,
    )


def _role_switch_to_pb(report: RoleSwitchReport, placed: int) -> pb.RoleSwitch:
    return pb.RoleSwitch(
        node=report.node,
        from_role=report.source_role.value,
        to_role=report.target_role.value,
        phase=report.outcome,
        drain_seconds=report.drain_seconds,
        switch_seconds=report.switch_seconds,
        probe_seconds=report.probe_seconds,
        detail=report.detail,
        generation=report.generation,
        placed=placed,
    )
