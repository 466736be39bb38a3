"""Converts the ratio, its target, pending role switches and advice to protobuf."""

from baton.pb import cluster_pb2 as pb
from baton.role_split import format_splits
from baton.types import Role
from coordinator.core.brain import Brain
from coordinator.core.common.effects import RoleSwitchReport
from coordinator.core.ratio.controller import RatioReport
from coordinator.core.ratio.split_forecast import SplitForecast


def ratio_to_pb(brain: Brain, now: float) -> pb.Ratio:
    switches = brain.role_switcher
    current, target = switches.roles.current_split(), switches.target_split
    controller = brain.ratio_controller
    results = controller.get_slo_results(now)
    answer = pb.Ratio(
        prefill=current.prefill_nodes,
        decode=current.decode_nodes,
        has_target=target is not None,
        generation=switches.target_generation,
        settled=switches.is_settled,
        possible=format_splits(switches.roles.list_possible_splits()),
        over=[_role_switch_to_pb(report, 0) for report in switches.finished],
        automatic=controller.is_automatic,
        slo=str(controller.target_slo),
        reason=controller.reason,
        ended=results.ended_requests,
        good=results.good_requests,
    )
    if target is not None:
        answer.target_prefill, answer.target_decode = target.prefill_nodes, target.decode_nodes
    for pending in switches.pending.values():
        answer.switches.append(
            _role_switch_to_pb(
                pending.build_report(pending.phase.value, now),
                brain.count_attempts(pending.incarnation),
            )
        )
    return answer


def advice_to_pb(report: RatioReport, queued: int) -> pb.RatioAdvice:
    advice, workload = report.advice, report.workload
    results, stages = report.slo_results, report.stage_seconds
    return pb.RatioAdvice(
        slo=str(advice.slo),
        prefill=advice.best_split.prefill_nodes,
        decode=advice.best_split.decode_nodes,
        present_prefill=advice.current_split.prefill_nodes,
        present_decode=advice.current_split.decode_nodes,
        reason=advice.reason,
        forecasts=[_forecast_to_pb(forecast) for forecast in advice.forecasts],
        seconds=workload.window_seconds,
        requests_per_second=workload.requests_per_second,
        burstiness=workload.burstiness,
        prompt_tokens_mean=workload.prompt_moments.mean,
        prompt_tokens_deviation=workload.prompt_moments.stddev,
        output_tokens_mean=workload.output_moments.mean,
        output_tokens_deviation=workload.output_moments.stddev,
        computed_share=workload.computed_share,
        prefill_tokens_per_second=workload.prefill_tokens_per_second,
        decode_tokens_per_second=workload.decode_tokens_per_second,
        queue_seconds=stages.queue,
        prefill_seconds=stages.prefill,
        transfer_seconds=stages.transfer,
        queued=queued,
        waiting_prefill=report.waiting_by_role[Role.PREFILL],
        waiting_decode=report.waiting_by_role[Role.DECODE],
        ended=results.ended_requests,
        good=results.good_requests,
    )


def _forecast_to_pb(forecast: SplitForecast) -> pb.SplitForecast:
    return pb.SplitForecast(
        prefill=forecast.split.prefill_nodes,
        decode=forecast.split.decode_nodes,
        ttft_p50=forecast.ttft_p50,
        ttft_p90=forecast.ttft_p90,
        ttft_p99=forecast.ttft_p99,
        tpot=forecast.tpot_mean,
        share=forecast.slo_attainment,
        goodput=forecast.goodput,
        prefill_load=forecast.prefill_load,
        decode_load=forecast.decode_load,
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
