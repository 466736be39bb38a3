"""The label values that each counter can have, as far as they are known in advance.

Their series are exposed with the value 0 from the start. Prometheus' `rate` and `increase` need two
samples of a series, so a series that appeared with its first event would hide that event, and with
it the first burst, from alerts.
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
from baton.types import TRANSPORTS, FinishReason, Role
from coordinator.core.admission.degradation import DegradationStep
from coordinator.core.common.breaker_state import BreakerState
from coordinator.core.common.counters import DEFAULT_TENANT_CLASS, INTERNAL_CLASS
from coordinator.core.placement.interface import PlacementReason, PrefillSite
from coordinator.core.requests.token_sources import TokenSources

MetricLabels = tuple[str, ...]

# Front ends raise these before a request is submitted, so no request ends with them.
_BEFORE_SUBMISSION = (NotSupported, NotFound, RequestTooLarge, Unauthenticated)


def list_known_labels(classes: Sequence[str]) -> dict[str, list[MetricLabels]]:
    """Return label values by the name of the metric, in the order of its labels.

    `classes` are the classes of the tenants.
    """
    every_class = (*classes, INTERNAL_CLASS)
    # Callers without a valid key are counted in the default class.
    rejected_classes = dict.fromkeys((*every_class, DEFAULT_TENANT_CLASS))
    replaced = [*_error_codes(HandoffFailed, NodeFailed), "refused"]
    handoff_ends: list[MetricLabels] = [("committed", transport) for transport in TRANSPORTS]
    handoff_ends += product(_error_codes(HandoffFailed), (*TRANSPORTS, "none"))
    return {
        "baton_requests_total": list(product(_list_outcomes(), every_class)),
        "baton_rejected_total": list(product(_error_codes(RequestRejected), rejected_classes)),
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
    """Yield all outcomes of an admitted request."""
    yield from (reason.value for reason in FinishReason)
    yield BatonError.code
    for code, error in ERRORS_BY_CODE.items():
        if not issubclass(error, (*_BEFORE_SUBMISSION, ConfigError)):
            yield code


def _error_codes(*kinds: type[BatonError]) -> list[str]:
    return [code for code, error in ERRORS_BY_CODE.items() if issubclass(error, kinds)]


def _single_labels(values: Sequence[str]) -> list[MetricLabels]:
    return [(value,) for value in values]
