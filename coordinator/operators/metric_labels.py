"""The label values that each counter can have, as far as they are known before anything was
counted.

Every series of them is exposed at 0 from the start. Prometheus' `rate` and `increase` need two
samples of a series, so that a series which appeared with its first event would hide that event, and
the first burst with it, from alerts.
"""

from collections.abc import Iterator, Sequence
from itertools import product

from baton.errors import (
    ERRORS_BY_CODE,
    BatonError,
    ConfigError,
    HandoffFailed,
    NodeFailed,
    NotFound,
    NotSupported,
    RequestRejected,
    RequestTooLarge,
    Unauthenticated,
)
from baton.types import FinishReason, Role
from coordinator.core.admission.degradation import DegradationStep
from coordinator.core.common.breaker_state import BreakerState
from coordinator.core.common.counters import DEFAULT_TENANT_CLASS, INTERNAL_CLASS
from coordinator.core.placement.decision import PlacementReason, PrefillSite
from coordinator.core.requests.token_sources import TokenSources

MetricLabels = tuple[str, ...]

TRANSPORTS = ("shm", "zmq", "grpc")
# A front door says these before there is a request that could end so.
_BEFORE_SUBMISSION = (NotSupported, NotFound, RequestTooLarge, Unauthenticated)


def list_known_labels(classes: Sequence[str]) -> dict[str, list[MetricLabels]]:
    """By the name of the metric; label values in the order of its labels. `classes` are those of
    the tenants."""
    every_class = (*classes, INTERNAL_CLASS)
    at_the_door = dict.fromkeys(
        (*every_class, DEFAULT_TENANT_CLASS)
    )  # whoever has no valid key has the class of all
    replaced = [*_error_codes(HandoffFailed, NodeFailed), "refused"]
    handoff_ends: list[MetricLabels] = [("committed", transport) for transport in TRANSPORTS]
    handoff_ends += product(_error_codes(HandoffFailed), (*TRANSPORTS, "none"))
    return {
        "baton_requests_total": list(product(_list_outcomes(), every_class)),
        "baton_rejected_total": list(product(_error_codes(RequestRejected), at_the_door)),
        "baton_prompt_tokens_total": _single_labels(TokenSources._fields),
        "baton_handoffs_total": handoff_ends,
        "baton_handoff_bytes_total": _single_labels(TRANSPORTS),
        "baton_placements_total": [
            (way.value, why.value) for way, why in product(PrefillSite, PlacementReason)
        ],
        "baton_replaced_total": _single_labels(replaced),
        "baton_recomputed_tokens_total": _single_labels(replaced),
        "baton_dropped_messages_total": _single_labels(
            ("stale", "unexpected", "damaged", "repeated", "lost")
        ),
        "baton_joins_total": _single_labels(("joined", "refused", "unauthenticated")),
        "baton_nodes_lost_total": _single_labels(_error_codes(NodeFailed)),
        "baton_breaker_changes_total": _single_labels([state.value for state in BreakerState]),
        "baton_degradation_changes_total": [
            (step.value, change)
            for step, change in product(DegradationStep, ("taken", "taken_back"))
        ],
        "baton_role_switches_total": list(
            product([role.value for role in Role], ("done", "recalled", "superseded", "lost"))
        ),
    }


def _list_outcomes() -> Iterator[str]:
    """How a request that was admitted can end."""
    yield from (reason.value for reason in FinishReason)
    yield BatonError.code
    for code, error in ERRORS_BY_CODE.items():
        if not issubclass(error, (*_BEFORE_SUBMISSION, ConfigError)):
            yield code


def _error_codes(*kinds: type[BatonError]) -> list[str]:
    return [code for code, error in ERRORS_BY_CODE.items() if issubclass(error, kinds)]


def _single_labels(values: Sequence[str]) -> list[MetricLabels]:
    return [(value,) for value in values]
