"""GpuEngine with FP8 products in Triton's interpreter, against its twin on CPUs.

tests/gpu has the same comparisons on a GPU."""

import numpy as np
import pytest

from tests.models import FamilyName
from tests.unit.node_engine.model.gpu.interpreted_engine import LENGTHS, Computed, run_interpreter

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Computed:
    return run_interpreter("fp8", tmp_path_factory)


@pytest.mark.parametrize("family", LENGTHS)
def test_fp8_logprobs_equal_those_of_the_twin(computed: Computed, family: FamilyName) -> None:
    """A value between two numbers of FP8 may be rounded either way, so a few of them differ."""
    found = computed.results[f"{family} fp8"]
    for part in ("scores", "special logprobs"):
        fused, twin, unquantized = (
            np.array(found[name][part]) for name in ("fused", "twin", "unquantized")
        )
        assert np.isfinite(fused).all()
        assert np.abs(fused - twin).mean() < 0.03
        assert np.abs(fused - unquantized).mean() > 0.1


@pytest.mark.parametrize("family", LENGTHS)
def test_fp8_tokens_equal_those_of_the_twin(computed: Computed, family: FamilyName) -> None:
    found = computed.results[f"{family} fp8"]
    tokens, twin = (np.array(found[name]["special tokens"]) for name in ("fused", "twin"))
    assert (tokens == twin).mean() > 0.95
