"""A coordinator's dispatcher and node links on loopback ports."""

from collections.abc import AsyncIterator

import pytest

from tests.integration.coordinator_harness import CoordinatorHarness, running_coordinator


@pytest.fixture
async def coordinator() -> AsyncIterator[CoordinatorHarness]:
    async with running_coordinator() as coordinator:
        yield coordinator
