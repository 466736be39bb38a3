"""The ratio, its target, the changes of role under way and advice on it, as operators are told."""

from baton.pb import cluster_pb2 as pb
from baton.ratio import told
from baton.types import Role
from coordinator.core.brain import Brain
from coordinator.core.forecast import Forecast
from coordinator.core.messages import Switched
from coordinator.core.pilot import Report


def ratio_to_pb(brain: Brain, now: float) -> pb.Ratio:
    switches = brain.switches
    have, target, pilot = switches.split(), switches.target, brain.pilot
    service = pilot.service(now)
    answer = pb.Ratio(
        prefill=have.prefill,
        decode=have.decode,
        has_target=target is not None,
        generation=switches.generation,
        settled=switches.settled,
        possible=told(switches.possible(now)),
        over=[_switch(report, 0) for report in switches.over],
        automatic=pilot.automatic,
        slo=str(pilot.slo),
        reason=pilot.reason,
        ended=service.ended,
        good=service.good,
    )
    if target is not None:
        answer.target_prefill, answer.target_decode = target.prefill, target.decode
    for flip in switches.flips.values():
        answer.switches.append(_switch(flip.report(flip.phase.value, now), brain.placed_on(flip.incarnation)))
    return answer


def advice_to_pb(report: Report, queued: int) -> pb.RatioAdvice:
    advice, asked, service, stages = report.advice, report.workload, report.service, report.stages
    return pb.RatioAdvice(
        slo=str(advice.slo),
        prefill=advice.best.prefill,
        decode=advice.best.decode,
        present_prefill=advice.present.prefill,
        present_decode=advice.present.decode,
        reason=advice.reason,
        forecasts=[_forecast(one) for one in advice.forecasts],
        seconds=asked.seconds,
        requests_per_second=asked.rate,
        burstiness=asked.burstiness,
        prompt_tokens_mean=asked.prompt.mean,
        prompt_tokens_deviation=asked.prompt.deviation,
        output_tokens_mean=asked.output.mean,
        output_tokens_deviation=asked.output.deviation,
        computed_share=asked.computed,
        prefill_tokens_per_second=asked.prefill_tokens,
        decode_tokens_per_second=asked.decode_tokens,
        queue_seconds=stages.queue,
        prefill_seconds=stages.prefill,
        transfer_seconds=stages.transfer,
        queued=queued,
        waiting_prefill=report.waiting[Role.PREFILL],
        waiting_decode=report.waiting[Role.DECODE],
        ended=service.ended,
        good=service.good,
    )


def _forecast(one: Forecast) -> pb.SplitForecast:
    return pb.SplitForecast(
        prefill=one.split.prefill,
        decode=one.split.decode,
        ttft_p50=one.ttft_p50,
        ttft_p90=one.ttft_p90,
        ttft_p99=one.ttft_p99,
        tpot=one.tpot,
        share=one.share,
        goodput=one.goodput,
        prefill_load=one.prefill_load,
        decode_load=one.decode_load,
    )


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
