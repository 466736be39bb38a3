"""What a link takes for messages, learned from the hand-offs that use it."""

import math
from dataclasses import dataclass, field

from baton.online_fit import OnlineLinearFit
from kv_transfer.core.send_queue import ReadyGate

_MIB = 1 << 20
_LINK_PRIOR = (0.0003, 0.0005)  # seconds: per message, per MiB. The first message scales them


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What a link takes to land messages, in seconds."""

    message_seconds: float = _LINK_PRIOR[0]
    byte_seconds: float = _LINK_PRIOR[1] / _MIB
    max_payload_bytes: int = _MIB  # of one message

    def transfer_seconds(self, num_layers: float, layer_bytes: int) -> float:
        """Seconds until whole layers have landed, as many in a message as it carries."""
        if not layer_bytes:
            return 0.0
        layers_per_message = self.max_payload_bytes // layer_bytes
        if layers_per_message:
            messages = math.ceil(num_layers / layers_per_message)
        else:
            messages = math.ceil(num_layers * math.ceil(layer_bytes / self.max_payload_bytes))
        return messages * self.message_seconds + num_layers * layer_bytes * self.byte_seconds


@dataclass(frozen=True, slots=True)
class BusyPeriod:
    """Messages of one hand-off from the moment that nothing was on its way to the next such one."""

    started_at: float
    messages: int
    size: int  # bytes

    def with_message(self, size: int, started_at: float) -> "BusyPeriod":
        """The period with one more message."""
        started_at = min(self.started_at, started_at)
        return BusyPeriod(started_at, self.messages + 1, self.size + size)


@dataclass(frozen=True, slots=True)
class _WaitingMessage:
    size: int  # bytes
    num_layers: int
    gate: ReadyGate

    @property
    def last_layer_bytes(self) -> int:
        """What is still to be written when the gate passes: layers are written one by one."""
        return self.size // self.num_layers


@dataclass(slots=True)
class LinkUsage:
    """The messages of a hand-off that are on their way. Times are on the plane's clock."""

    _period: BusyPeriod | None = None  # of messages whose slabs are final
    _waiting: list[_WaitingMessage] = field(default_factory=list)  # the link does nothing for them

    def add_message(
        self, size: int, gate: ReadyGate | None, now: float, num_layers: int = 1
    ) -> None:
        """A message of `size` bytes was begun."""
        if gate is not None and gate.passed_at is None:
            self._waiting.append(_WaitingMessage(size, num_layers, gate))
        else:
            self._add_to_period(size, now)

    def take_busy_period(self, unacked_bytes: int) -> BusyPeriod | None:
        """The busy period that has ended; None if there was none or it goes on.

        It has ended when all has landed that does not wait for its gate.
        """
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            if message.gate.passed_at is None:
                self._waiting.append(message)
            else:
                self._add_to_period(message.last_layer_bytes, message.gate.passed_at)
        if unacked_bytes > sum(message.size for message in self._waiting):
            return None
        period, self._period = self._period, None
        return period

    def _add_to_period(self, size: int, started_at: float) -> None:
        period = self._period or BusyPeriod(started_at, 0, 0)
        self._period = period.with_message(size, started_at)


class LinkCostEstimator:
    """Learns the cost of one link from busy periods, the newest ones weighing most.

    A busy period is observed as a whole, because messages overlap: while one lands, the next is
    written.
    """

    def __init__(self, max_payload_bytes: int) -> None:
        self._fit = OnlineLinearFit(_LINK_PRIOR)
        self.cost = LinkCost(max_payload_bytes=max_payload_bytes)

    def observe_busy_period(self, period: BusyPeriod, ended_at: float) -> None:
        """Everything that was sent in the period has landed."""
        features = float(period.messages), period.size / _MIB
        self._fit.add_observation(features, ended_at - period.started_at)
        per_message, per_mib = self._fit.coefficients
        self.cost = LinkCost(per_message, per_mib / _MIB, self.cost.max_payload_bytes)
