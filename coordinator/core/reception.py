"""Who comes in, and as what: the door of the request table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.errors import Draining, InvalidRequest, OverLimit, Overloaded, Rejected, Unavailable
from baton.limits import ModelBounds, check_length
from baton.types import Request, RequestId, Standing
from coordinator.core.admission import Bid
from coordinator.core.counters import INTERNAL
from coordinator.core.degradation import Step
from coordinator.core.requests import UNSERVED_PATIENCE, RequestTable
from coordinator.core.settings import Settings


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes in. `after`: one of the same prompt, on whose decode node it needs no prefill; a request
    that is not here, has another prompt or another salt is no reason to wait."""

    request: Request
    after: RequestId | None = None


class Reception:
    """While `draining`, nobody is let in."""

    def __init__(self, table: RequestTable, settings: Settings) -> None:
        self.draining = False
        self._table = table
        self._settings = settings

    def take_in(self, arrivals: Sequence[Arrival], now: float, *, internal: bool) -> None:
        """See `Brain.submit_all`."""
        first = arrivals[0].request
        try:
            self._require_room([arrival.request for arrival in arrivals], now)
            bounds = self.bounds()
            for request in (arrival.request for arrival in arrivals):
                check_length(len(request.prompt), request.sampling.max_tokens, bounds)
        except Rejected as error:
            self.refuse(error, INTERNAL if internal else first.standing.tenant_class, now)
            raise
        if not internal:
            arrivals = [self._capped(arrival) for arrival in arrivals]
        records = [self._table.add(one.request, now, internal=internal, after=one.after) for one in arrivals]
        records[0].others = tuple(record.request.id for record in records[1:])

    def require(self, standing: Standing, bid: Bid, now: float) -> None:
        """Whether it would be let in. Raises Draining, Overloaded or InvalidRequest; not counted."""
        if self.draining:
            raise Draining("the cluster is stopping and takes no new requests")
        limit = self._settings.max_queue
        if bid.count > limit:
            raise InvalidRequest(
                f"{bid.count} outputs are asked for at once, the limit is {limit} (--max-queue)", param="n"
            )
        self._table.admission.require(standing, bid, now)

    def refuse(self, error: Rejected, tenant_class: str, now: float) -> None:
        """Count a request that is not let in. What there is no room for is asked for all the same."""
        self._table.counters.rejected[error.code, tenant_class] += 1
        no_room = isinstance(error, Overloaded) and not isinstance(error, OverLimit)
        if no_room and tenant_class != INTERNAL:
            self._table.knowledge.workload.refused(now)

    def bounds(self) -> ModelBounds:
        """Raises Unavailable before the first join."""
        bounds = self._table.capacity.bounds()
        if bounds is None:
            raise Unavailable("no node has joined the cluster yet", retry_after=UNSERVED_PATIENCE)
        return bounds

    def _require_room(self, requests: Sequence[Request], now: float) -> None:
        tokens = sum(len(request.prompt) for request in requests)
        longest = max(request.sampling.max_tokens for request in requests)
        self.require(requests[0].standing, Bid(len(requests), requests[0].timeout, tokens, longest), now)

    def _capped(self, arrival: Arrival) -> Arrival:
        """As it is let in while outputs are capped."""
        most, sampling = self._settings.degraded_max_tokens, arrival.request.sampling
        if Step.CAPPED_OUTPUT not in self._table.degradation or sampling.max_tokens <= most:
            return arrival
        capped = replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
        return replace(arrival, request=replace(arrival.request, sampling=capped))
