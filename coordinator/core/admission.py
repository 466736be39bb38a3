"""Who is let in. Asked before anything is spent on a request, and cheap: a few sums over what waits.

- A tenant's own limits on requests and tokens (`TokenBucket`).
- A bounded queue, in requests and in prompt tokens. The bounds hold for what a class has to wait for, so that lower
  classes fill no place of a higher one; and among tenants of a class each may take its weight's worth of the places
  that are still free (Choudhury, Hahne: "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", IEEE/ACM
  Transactions on Networking, 1998), so that one that floods the queue leaves room for the others.
- The predicted wait against what the request's deadline leaves beside computing its prompt and giving the answer, which
  would be computed for nothing if the deadline cut it off, or the class's `max_wait` if that is shorter. It is what is
  ahead in the queue over the rate at which it drains, and what nodes have still to compute.

Every refusal says when to come back.
"""

from dataclasses import dataclass
from typing import Protocol

from baton.errors import OverLimit, Overloaded
from baton.types import Request, RequestId, Standing
from coordinator.core.degradation import Degradation, Step
from coordinator.core.fair_order import Claim
from coordinator.core.queue import WaitingQueue, clamp_retry, due
from coordinator.core.settings import QueueLimits
from coordinator.core.tenants import Tenant, Tenants
from coordinator.core.token_bucket import TokenBucket

SHED_RETRY = 10.0  # seconds
SMALLER = 0.5  # of a tenant's tokens a second, while budgets are smaller


class Expectations(Protocol):
    """See `Prospects`."""

    def computing(self, tokens: int) -> float: ...

    def answering(self, tenant: str, max_tokens: int) -> float: ...

    def node_wait(self, now: float) -> float: ...

    def decode_full(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Bid:
    """What asks to be let in: `count` requests of `tokens` prompt tokens together, of up to `output` tokens each, that
    have `timeout` seconds. Tokens are 0 before they are known."""

    count: int
    timeout: float
    tokens: int = 0
    output: int = 0


@dataclass(slots=True)
class _Account:
    requests: TokenBucket | None
    tokens: TokenBucket | None


class Admission:
    def __init__(
        self,
        queue: WaitingQueue,
        limits: QueueLimits,
        prospects: Expectations,
        degradation: Degradation | None = None,
    ) -> None:
        self.tenants = Tenants()
        self._queue = queue
        self._limits = limits
        self._prospects = prospects
        self._degradation = degradation or Degradation()
        self._accounts: dict[str, _Account] = {}

    def reload(self, tenants: Tenants, now: float) -> None:
        """Debts stay; whoever is no tenant any more is forgotten."""
        self.tenants = tenants
        for name in list(self._accounts):
            tenant = tenants.tenants.get(name)
            if tenant is None:
                del self._accounts[name]
                continue
            old, new = self._accounts[name], self._new_account(tenant, now)
            self._accounts[name] = _Account(
                _carried(old.requests, new.requests, now), _carried(old.tokens, new.tokens, now)
            )

    def degraded(self, now: float) -> None:
        """A step of degradation was taken or taken back: limits follow. Debts stay."""
        self.reload(self.tenants, now)

    def require(self, standing: Standing, bid: Bid, now: float) -> None:
        """Whether all of it is let in. Nothing is paid. Raises Overloaded, OverLimit if that is its tenant's
        own doing."""
        lowest = len(self.tenants.classes) - 1
        if Step.SHED_LOWEST in self._degradation and lowest and standing.level == lowest:
            raise Overloaded(
                f"class {standing.tenant_class!r}, the lowest, is refused while requests wait too long (shed_lowest)",
                retry_after=SHED_RETRY,
            )
        tenant = self.tenants.get(standing.tenant)
        self._require_rate(tenant, now)
        try:
            self._require_place(standing, tenant, bid.count)
            self._require_token_place(standing, bid.tokens)
            self._require_patience(Claim(tenant.name, standing.level, tenant.weight, bid.tokens), standing, bid, now)
        except Overloaded:
            self._queue.refused(standing.level, standing.tenant, bid.count, now)
            raise

    def let_in(self, request: Request, now: float) -> Claim:
        """One request: it and its prompt are paid for. What it brings into the queue."""
        standing, tokens = request.standing, len(request.prompt)
        account = self._account(standing.tenant, now)
        if account.requests is not None:
            account.requests.pay(1.0, now)
        self.produced(standing.tenant, tokens, now)
        when = due(self._prospects.computing(tokens), now, now + request.timeout)
        weight = self.tenants.get(standing.tenant).weight
        return Claim(standing.tenant, standing.level, weight, tokens, when, now)

    def give_back(self, request: Request, now: float, *, accepted: bool) -> None:
        """Of one that has ended and was never placed: nothing was computed for it. `accepted`: it had been taken on."""
        account = self._account(request.standing.tenant, now)
        if account.requests is not None and not accepted:
            account.requests.pay(-1.0, now)
        self.produced(request.standing.tenant, -len(request.prompt), now)

    def reserve_against(self, standing: Standing) -> float:
        """The share of a node's blocks and places that a request must leave to the first class."""
        return self.tenants.reserve if standing.level > 0 else 0.0

    def headroom(self, request: RequestId, now: float) -> float:
        """The share of a node that a waiting request must leave to other tenants of its class, because its own asks
        for more than its share and has it."""
        return self._queue.headroom(request, self.tenants.headroom, now)

    def produced(self, tenant: str, tokens: int, now: float) -> None:
        account = self._account(tenant, now)
        if account.tokens is not None:
            account.tokens.pay(tokens, now)

    def _require_rate(self, tenant: Tenant, now: float) -> None:
        account = self._account(tenant.name, now)
        for bucket, unit in ((account.requests, "requests"), (account.tokens, "tokens")):
            wait = bucket.wait(now) if bucket is not None else 0.0
            if bucket is not None and wait > 0:
                raise OverLimit(
                    f"tenant {tenant.name} has used up its {bucket.rate:g} {unit} a second ({unit}_per_second)",
                    retry_after=clamp_retry(wait),
                )

    def _require_place(self, standing: Standing, tenant: Tenant, count: int) -> None:
        limit, waiting = self._limits.requests, self._queue.waiting(standing.level)
        more = f", {count} more would come" if count > 1 else ""
        if waiting + count > limit:
            raise Overloaded(
                f"{waiting} requests are waiting{more}, the limit is {limit} (--max-queue)",
                retry_after=self._queue.retry_after(standing.level),
            )
        if len(self.tenants.tenants) > 1:
            own, share = self._queue.waiting(standing.level, tenant.name), tenant.weight * (limit - waiting)
            if own + count > max(share, 1.0) and own:
                raise Overloaded(
                    f"{own} requests of tenant {tenant.name} are waiting{more}, its share of the free places is"
                    f" {share:.0f} (--max-queue)",
                    retry_after=self._queue.retry_after(standing.level),
                )

    def _require_token_place(self, standing: Standing, tokens: int) -> None:
        """What waits is held in memory. One that finds nobody waiting is let in, however long it is."""
        limit, waiting = self._limits.tokens, self._queue.waiting_tokens(standing.level)
        if waiting and waiting + max(tokens, 1) > limit:
            raise Overloaded(
                f"{waiting} prompt tokens are waiting, {tokens} more would come, the limit is {limit}"
                " (--max-queue-tokens)",
                retry_after=self._queue.retry_after(standing.level),
            )

    def _require_patience(self, claim: Claim, standing: Standing, bid: Bid, now: float) -> None:
        """What takes longer to serve than it has is no reason to come back later: it is let in, and ends with
        DeadlineExceeded when its turn comes and others want it, or when its time is over."""
        expected = self._prospects
        left = bid.timeout - expected.computing(claim.tokens) - expected.answering(standing.tenant, bid.output)
        limit = min(left, self.tenants.max_wait.get(standing.tenant_class, left))
        ahead = self._queue.ahead(claim, decode_full=len(self._queue) > 0 and self._prospects.decode_full())
        wait = self._queue.rate.predict_wait(ahead) + self._prospects.node_wait(now)
        if left > 0 and wait > limit:
            raise Overloaded(
                f"the prompt would wait {wait:.1f} s to be computed, the limit is {limit:.3g} s (what its deadline"
                f" leaves, or max_wait of class {standing.tenant_class!r})",
                retry_after=clamp_retry(wait - limit),
            )

    def _new_account(self, tenant: Tenant, now: float) -> _Account:
        rate = tenant.tokens_per_second
        if rate is not None and Step.SMALLER_TOKEN_BUDGET in self._degradation:
            rate *= SMALLER
        return _Account(
            _bucket(tenant.requests_per_second, tenant.request_burst, now),
            _bucket(rate, tenant.token_burst, now),
        )

    def _account(self, name: str, now: float) -> _Account:
        account = self._accounts.get(name)
        if account is None:
            account = self._new_account(self.tenants.get(name), now)
            if name in self.tenants.tenants:
                self._accounts[name] = account
        return account


def _bucket(rate: float | None, burst: float, now: float) -> TokenBucket | None:
    return None if rate is None else TokenBucket.full(rate, burst, now)


def _carried(old: TokenBucket | None, new: TokenBucket | None, now: float) -> TokenBucket | None:
    if old is None or new is None:
        return new
    old.change(new.rate, new.burst, now)
    return old
