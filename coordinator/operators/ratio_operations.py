"""What operators can read and change of the ratio of prefill to decode nodes."""

import math

from baton.config.coordinator_config import MAX_SECONDS, CoordinatorConfig
from baton.errors import InvalidRequest
from baton.pb import cluster_pb2 as pb
from baton.process import log
from baton.role_split import RoleSplit
from baton.slo import Slo
from coordinator.node_links.dispatcher import Dispatcher
from coordinator.operators.ratio_view import advice_to_pb, ratio_to_pb

_log = log.get_logger("operations")


class RatioOperations:
    """Runs on the coordinator's event loop."""

    def __init__(self, config: CoordinatorConfig, dispatcher: Dispatcher) -> None:
        self._config = config
        self._dispatcher = dispatcher

    def get_ratio(self) -> pb.Ratio:
        return ratio_to_pb(self._dispatcher.brain, self._dispatcher.clock())

    def set_ratio(self, target: RoleSplit, flip_timeout: float | None) -> pb.Ratio:
        """Returns at once; see `Brain.set_ratio`. Raises InvalidRequest."""
        check_seconds("flip_timeout", flip_timeout)
        seconds = self._config.flip_timeout if flip_timeout is None else flip_timeout
        brain, now = self._dispatcher.brain, self._dispatcher.clock()
        self._dispatcher.apply_effects(brain.set_ratio(target, seconds, now))
        _log.info("ratio set", target=str(target), flip_timeout=seconds)
        self._dispatcher.notify_cluster_change()
        return self.get_ratio()

    def advise_ratio(self, slo: Slo | None) -> pb.RatioAdvice:
        """See `RatioController.get_advice`. Raises ServiceUnavailable, InvalidRequest."""
        brain = self._dispatcher.brain
        return advice_to_pb(
            brain.ratio_controller.get_advice(slo, self._dispatcher.clock()), brain.queued_requests
        )

    def set_auto_ratio(self, slo: Slo | None, flip_timeout: float | None) -> pb.Ratio:
        """Returns at once; see `Brain.set_auto_ratio`. Raises InvalidRequest."""
        check_seconds("flip_timeout", flip_timeout)
        seconds = self._config.flip_timeout if flip_timeout is None else flip_timeout
        brain, now = self._dispatcher.brain, self._dispatcher.clock()
        self._dispatcher.apply_effects(brain.set_auto_ratio(slo, seconds, now))
        _log.info(
            "automatic ratio enabled",
            slo=str(brain.ratio_controller.target_slo),
            role_switch_timeout=seconds,
        )
        self._dispatcher.notify_cluster_change()
        return self.get_ratio()

    def set_manual_ratio(self) -> pb.Ratio:
        self._dispatcher.brain.set_manual_ratio()
        _log.info("automatic ratio disabled")
        self._dispatcher.notify_cluster_change()
        return self.get_ratio()


def check_seconds(param: str, seconds: float | None) -> None:
    """Raises InvalidRequest."""
    if seconds is not None and not (math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
        raise InvalidRequest(
            f"{param}_seconds is {seconds:g}: it must be 0 to {MAX_SECONDS:g}", param=param
        )
