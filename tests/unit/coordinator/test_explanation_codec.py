"""An explanation that is kept is read back as it was."""

from dataclasses import replace

from hypothesis import given, settings

from coordinator.core.placement.interface import LatencyPrediction
from coordinator.core.requests.explanation import RequestExplanation
from coordinator.explanation_codec import EXPLANATION_PACKING
from tests.unit.baton.cluster_link.message_strategies import comparable, strategy_of


def without_resident_tokens(prediction: LatencyPrediction) -> LatencyPrediction:
    """They are for placement alone, and are not kept."""
    return replace(prediction, resident_tokens=0.0)


def as_kept(explanation: RequestExplanation) -> RequestExplanation:
    attempts = (
        replace(
            attempt,
            prediction=without_resident_tokens(attempt.prediction),
            rejected_prediction=attempt.rejected_prediction
            and without_resident_tokens(attempt.rejected_prediction),
        )
        for attempt in explanation.attempts
    )
    # where the sources are not known, nothing is said of hand-offs
    received = explanation.received_tokens if explanation.sources is not None else 0
    return replace(explanation, attempts=tuple(attempts), received_tokens=received)


@settings(max_examples=50)
@given(strategy_of(RequestExplanation))
def test_packed_explanation_round_trip(explanation: RequestExplanation) -> None:
    packed = EXPLANATION_PACKING.pack(explanation)
    assert isinstance(packed, bytes)
    assert comparable(EXPLANATION_PACKING.unpack(packed)) == comparable(as_kept(explanation))
