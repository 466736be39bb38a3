"""The capacity of the simulated nodes, for the tests that offer multiples of it."""

import pytest

from tests.unit.coordinator.core.admission.simulated_load import (
    REQUEST_LENGTHS,
    completion_rate,
    make_cluster,
)


@pytest.fixture(scope="module")
def capacity() -> float:
    """Requests a second that a saturated node ends."""
    cluster = make_cluster(max_queue=64)
    cluster.schedule_poisson_load(100.0, 20.0, **REQUEST_LENGTHS)
    cluster.run(20.0)
    return completion_rate(cluster, 5.0, 20.0)
