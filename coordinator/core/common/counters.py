"""Counters since the coordinator's start, read by metrics and Status. Only the brain and its two
front ends write them. Tuple keys are label values, in the order of the metric's labels."""

from collections import Counter
from dataclasses import dataclass, field

DEFAULT_TENANT_CLASS = "default"  # the class of clients without a tenant
INTERNAL_CLASS = "internal"  # the class of warm-ups and probes


@dataclass(slots=True)
class Counters:
    """All counters; a front end, the brain or its parts increment them."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # outcome, class
    rejected: Counter[tuple[str, str]] = field(default_factory=Counter)  # reason, class
    prompt_tokens: Counter[str] = field(default_factory=Counter)  # source
    generated_tokens: int = 0
    handoffs: Counter[tuple[str, str]] = field(default_factory=Counter)  # outcome, transport
    handoff_bytes: Counter[str] = field(default_factory=Counter)  # transport
    placements: Counter[tuple[str, str]] = field(default_factory=Counter)  # prefill site, reason
    replaced_attempts: Counter[str] = field(default_factory=Counter)  # reason
    recomputed_tokens: Counter[str] = field(default_factory=Counter)  # reason
    dropped_messages: Counter[str] = field(
        default_factory=Counter
    )  # reason: stale, unexpected, duplicate
    joins: Counter[str] = field(
        default_factory=Counter
    )  # outcome: joined, refused, unauthenticated
    breaker_changes: Counter[str] = field(default_factory=Counter)  # the new state
    lost_nodes: Counter[str] = field(default_factory=Counter)  # reason
