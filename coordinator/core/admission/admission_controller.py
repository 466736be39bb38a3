"""Decides whether a request is admitted, before anything is spent on it.

The checks are cheap, a few sums over the waiting requests:

- A tenant's own limits on requests and tokens (`TokenBucket`).
- A bounded queue, in requests and in prompt tokens. A class counts only the requests that it has
  to wait for, so lower classes take no place from a higher one. Among the tenants of a class each
  may take its weight times the free places (Choudhury, Hahne: "Dynamic Queue Length Thresholds for
  Shared-Memory Packet Switches", IEEE/ACM Transactions on Networking, 1998), so a tenant that
  floods the queue leaves room for the others.
- The predicted wait, against what the deadline leaves besides prefill and decode, or against the
  class's `max_wait` if that is shorter: work that the deadline cuts off would be wasted. The wait
  is the backlog ahead over the rate at which the queue drains, and what nodes have yet to compute.

Every rejection says when to retry.

Retries amplify trouble: a cluster that fails every attempt would be given each request
`--max-attempts` times. So `RetryBudget` bounds them to a share of the offered load (Finagle's
RetryBudget, and "Handling overload" in Beyer, Jones, Petoff, Murphy, "Site Reliability
Engineering", 2016). The floor lets a lone request have all of its attempts.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from baton.errors import Overloaded, TenantLimitExceeded
from baton.types import Principal, Request, RequestId
from coordinator.core.admission.degradation import DegradationController, DegradationStep
from coordinator.core.admission.tenants import Tenant, TenantTable, TokenBucket
from coordinator.core.admission.waiting_queue import (
    QueueEntry,
    WaitingQueue,
    clamp_retry_after,
    compute_due_time,
)
from coordinator.core.common.settings import QueueLimits

SHED_RETRY_SECONDS = 10.0  # seconds that clients of a class that is shed are asked to wait
REDUCED_TOKEN_BUDGET = 0.5  # share of tokens_per_second under degradation


class LatencyEstimates(Protocol):
    """The predictions that admission is decided by, in seconds."""

    def prefill_seconds(self, tokens: int) -> float: ...

    def decode_seconds(self, tenant: str, max_tokens: int) -> float: ...

    def node_wait_seconds(self, now: float) -> float: ...

    def is_decode_full(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """What is to be admitted: several requests with one tenant and deadline."""

    request_count: int
    timeout_seconds: float  # time that their client gives them
    prompt_tokens: int = 0  # of all of them; 0 if not known yet
    max_output_tokens: int = 0  # of each; 0 if not known yet


@dataclass(slots=True)
class _TenantAccount:
    request_bucket: TokenBucket | None
    token_bucket: TokenBucket | None


class AdmissionController:
    """Admits or rejects requests, and keeps each tenant's account of its limits."""

    def __init__(
        self,
        queue: WaitingQueue,
        limits: QueueLimits,
        latency_estimates: LatencyEstimates,
        degradation: DegradationController | None = None,
    ) -> None:
        self.tenants = TenantTable()
        self._queue = queue
        self._limits = limits
        self._latency_estimates = latency_estimates
        self._degradation = degradation or DegradationController()
        self._accounts: dict[str, _TenantAccount] = {}

    def reload_tenants(self, tenants: TenantTable, now: float) -> None:
        """Replace the tenants. Debts are kept; removed tenants are forgotten."""
        self.tenants = tenants
        for name in list(self._accounts):
            tenant = tenants.by_name.get(name)
            if tenant is None:
                del self._accounts[name]
                continue
            old, new = self._accounts[name], self._new_account(tenant, now)
            self._accounts[name] = _TenantAccount(
                _carry_over_debt(old.request_bucket, new.request_bucket, now),
                _carry_over_debt(old.token_bucket, new.token_bucket, now),
            )

    def on_degradation_changed(self, now: float) -> None:
        """Adapt the tenants' limits to the degradation steps. Debts are kept."""
        self.reload_tenants(self.tenants, now)

    def check_admission(
        self, principal: Principal, admission: AdmissionRequest, now: float
    ) -> None:
        """Raise Overloaded unless all would be admitted, TenantLimitExceeded if the tenant's own
        limit is the reason. Nothing is charged."""
        lowest = len(self.tenants.classes) - 1
        if (
            DegradationStep.SHED_LOWEST in self._degradation.active_steps
            and lowest
            and principal.priority_level == lowest
        ):
            raise Overloaded(
                f"class {principal.tenant_class!r}, the lowest, is refused while requests wait"
                " too long (shed_lowest)",
                retry_after=SHED_RETRY_SECONDS,
            )
        tenant = self.tenants.get_tenant(principal.tenant)
        self._check_rate(tenant, now)
        try:
            self._check_queue_place(principal, tenant, admission.request_count)
            self._check_queue_tokens(principal, admission.prompt_tokens)
            self._check_predicted_wait(
                QueueEntry(
                    tenant.name, principal.priority_level, tenant.weight, admission.prompt_tokens
                ),
                principal,
                admission,
                now,
            )
        except Overloaded:
            self._queue.backlog.record_rejection(
                principal.priority_level, principal.tenant, admission.request_count, now
            )
            raise

    def admit_request(self, request: Request, now: float) -> QueueEntry:
        """Charge for one request and its prompt; return its entry for the queue."""
        principal, tokens = request.principal, len(request.prompt_token_ids)
        account = self._account(principal.tenant, now)
        if account.request_bucket is not None:
            account.request_bucket.charge_tokens(1.0, now)
        self.charge_tokens(principal.tenant, tokens, now)
        when = compute_due_time(
            self._latency_estimates.prefill_seconds(tokens), now, now + request.timeout_seconds
        )
        weight = self.tenants.get_tenant(principal.tenant).weight
        return QueueEntry(principal.tenant, principal.priority_level, weight, tokens, when, now)

    def refund_request(self, request: Request, now: float, *, accepted: bool) -> None:
        """Refund a request that ended without having been placed. The request itself is refunded
        only if it was not `accepted`."""
        account = self._account(request.principal.tenant, now)
        if account.request_bucket is not None and not accepted:
            account.request_bucket.charge_tokens(-1.0, now)
        self.charge_tokens(request.principal.tenant, -len(request.prompt_token_ids), now)

    def reserved_share(self, principal: Principal) -> float:
        """Return the share of a node that the request must leave to the first class."""
        return self.tenants.reserved_share if principal.priority_level > 0 else 0.0

    def headroom_share(self, request: RequestId, now: float) -> float:
        """Return the share of a node that the waiting request must leave to other tenants of its
        class, because its own tenant has more than its share and asks for more."""
        return self._queue.headroom_share(request, self.tenants.headroom_share, now)

    def charge_tokens(self, tenant: str, tokens: int, now: float) -> None:
        account = self._account(tenant, now)
        if account.token_bucket is not None:
            account.token_bucket.charge_tokens(tokens, now)

    def _check_rate(self, tenant: Tenant, now: float) -> None:
        account = self._account(tenant.name, now)
        for bucket, unit in (
            (account.request_bucket, "requests"),
            (account.token_bucket, "tokens"),
        ):
            wait = bucket.wait_seconds(now) if bucket is not None else 0.0
            if bucket is not None and wait > 0:
                raise TenantLimitExceeded(
                    f"tenant {tenant.name} has used up its {bucket.rate:g} {unit} a second"
                    f" ({unit}_per_second)",
                    retry_after=clamp_retry_after(wait),
                )

    def _check_queue_place(self, principal: Principal, tenant: Tenant, count: int) -> None:
        limit, waiting = (
            self._limits.max_requests,
            self._queue.backlog.count_waiting(principal.priority_level),
        )
        more = f", {count} more would come" if count > 1 else ""
        if waiting + count > limit:
            raise Overloaded(
                f"{waiting} requests are waiting{more}, the limit is {limit} (--max-queue)",
                retry_after=self._queue.backlog.retry_after_seconds(principal.priority_level),
            )
        if len(self.tenants.by_name) > 1:
            own_count, share = (
                self._queue.backlog.count_waiting(principal.priority_level, tenant.name),
                tenant.weight * (limit - waiting),
            )
            if own_count + count > max(share, 1.0) and own_count:
                raise Overloaded(
                    f"{own_count} requests of tenant {tenant.name} are waiting{more}, its share of"
                    f" the free places is {share:.0f} (--max-queue)",
                    retry_after=self._queue.backlog.retry_after_seconds(principal.priority_level),
                )

    def _check_queue_tokens(self, principal: Principal, tokens: int) -> None:
        """Bound the memory of waiting prompts. With nothing waiting, any length is admitted."""
        limit, waiting = (
            self._limits.max_tokens,
            self._queue.backlog.count_waiting_tokens(principal.priority_level),
        )
        if waiting and waiting + max(tokens, 1) > limit:
            raise Overloaded(
                f"{waiting} prompt tokens are waiting, {tokens} more would come, the limit is"
                f" {limit}"
                " (--max-queue-tokens)",
                retry_after=self._queue.backlog.retry_after_seconds(principal.priority_level),
            )

    def _check_predicted_wait(
        self, entry: QueueEntry, principal: Principal, admission: AdmissionRequest, now: float
    ) -> None:
        """Reject a request whose predicted wait is too long. One that cannot meet its deadline even
        without a wait is admitted, because retrying would not help: it ends with DeadlineExceeded
        when its turn comes or its time is over."""
        estimates = self._latency_estimates
        time_left = (
            admission.timeout_seconds
            - estimates.prefill_seconds(entry.prompt_tokens)
            - estimates.decode_seconds(principal.tenant, admission.max_output_tokens)
        )
        limit = min(time_left, self.tenants.max_wait_seconds.get(principal.tenant_class, time_left))
        ahead = self._queue.backlog.backlog_ahead(
            entry, decode_full=len(self._queue) > 0 and self._latency_estimates.is_decode_full()
        )
        wait = self._queue.service_rate.predict_wait_seconds(
            ahead
        ) + self._latency_estimates.node_wait_seconds(now)
        if time_left > 0 and wait > limit:
            raise Overloaded(
                f"the prompt would wait {wait:.1f} s to be computed, the limit is {limit:.3g} s"
                " (what its deadline"
                f" leaves, or max_wait of class {principal.tenant_class!r})",
                retry_after=clamp_retry_after(wait - limit),
            )

    def _new_account(self, tenant: Tenant, now: float) -> _TenantAccount:
        rate = tenant.tokens_per_second
        if (
            rate is not None
            and DegradationStep.SMALLER_TOKEN_BUDGET in self._degradation.active_steps
        ):
            rate *= REDUCED_TOKEN_BUDGET
        return _TenantAccount(
            _make_bucket(tenant.requests_per_second, tenant.request_burst, now),
            _make_bucket(rate, tenant.token_burst, now),
        )

    def _account(self, name: str, now: float) -> _TenantAccount:
        account = self._accounts.get(name)
        if account is None:
            account = self._new_account(self.tenants.get_tenant(name), now)
            if name in self.tenants.by_name:
                self._accounts[name] = account
        return account


def _make_bucket(rate: float | None, burst: float, now: float) -> TokenBucket | None:
    return None if rate is None else TokenBucket.make_full(rate, burst, now)


def _carry_over_debt(
    old: TokenBucket | None, new: TokenBucket | None, now: float
) -> TokenBucket | None:
    if old is None or new is None:
        return new
    old.set_limits(new.rate, new.burst, now)
    return old


RETRY_WINDOW_SECONDS = 10.0  # over which requests and retries are counted
MIN_RETRIES = 30  # allowed in any window, whatever the load
_BUCKET_SECONDS = 0.1  # requests that arrive within are counted as one entry


class RetryBudget:
    """Allows `retry_share` of the requests of the last RETRY_WINDOW_SECONDS, or MIN_RETRIES if
    that is more."""

    def __init__(self, share: float) -> None:
        self.retry_share = share
        self._request_counts: deque[tuple[float, int]] = deque()  # start of interval, number
        self._total = 0
        self._retries: deque[float] = deque()

    def record_request(self, now: float) -> None:
        """Count a new request."""
        self._expire(now)
        if self._request_counts and now - self._request_counts[-1][0] < _BUCKET_SECONDS:
            since, count = self._request_counts.pop()
            self._request_counts.append((since, count + 1))
        else:
            self._request_counts.append((now, 1))
        self._total += 1

    def try_spend(self, now: float) -> bool:
        """Spend one retry if the budget has one; return whether it did."""
        if self.available_retries(now) <= 0:
            return False
        self._retries.append(now)
        return True

    def available_retries(self, now: float) -> int:
        """Return the retries that are allowed now."""
        self._expire(now)
        return max(0, max(MIN_RETRIES, int(self.retry_share * self._total)) - len(self._retries))

    def next_expiry_at(self) -> float | None:
        """Return when the oldest retry leaves the window and may allow another one."""
        return self._retries[0] + RETRY_WINDOW_SECONDS if self._retries else None

    def _expire(self, now: float) -> None:
        while self._request_counts and self._request_counts[0][0] <= now - RETRY_WINDOW_SECONDS:
            self._total -= self._request_counts.popleft()[1]
        while self._retries and self._retries[0] + RETRY_WINDOW_SECONDS <= now:
            self._retries.popleft()
