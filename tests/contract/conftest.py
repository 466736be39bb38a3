"""A pair of nodes on each transport, for the tests of its contract."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.transfer_pair import (
    BACKENDS,
    TransferPair,
    transfer_pair,
)


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TransferPair]:
    with transfer_pair(request.param, tmp_path) as opened:
        yield opened
        assert opened.decode_events.drain_unexpected() == []
        assert opened.prefill_events.drain_unexpected() == []


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)
