"""GpuEngine in Triton's interpreter, against transformers and ModelEngine.

tests/gpu has the same comparisons on a GPU."""

import pytest

from tests.models import FamilyName
from tests.unit.node_engine.model.gpu.interpreted_engine import LENGTHS, Computed, run_interpreter

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Computed:
    return run_interpreter("plain", tmp_path_factory)


@pytest.mark.parametrize("family", LENGTHS)
def test_tokens_of_mixed_steps_equal_transformers(computed: Computed, family: FamilyName) -> None:
    assert computed.results[f"{family} tokens"] == [
        list(stable.reference_tokens) for stable in computed.prompts[family]
    ]


def test_decode_continues_from_announced_layers(computed: Computed) -> None:
    wanted = computed.prompts["mixed"][-1].reference_tokens
    assert computed.results["handoff"] == list(wanted)


def test_saved_blocks_equal_announced_ones(computed: Computed) -> None:
    assert computed.results["is_saved"] is True


def test_steps_that_run_ahead_change_no_token(computed: Computed) -> None:
    """Sequences join while a step that was launched ahead is computed, and end one by one."""
    found = computed.results["run_ahead"]
    assert found["ahead"] == found["eager"]
    launches = [(is_decode, is_ahead) for is_decode, is_ahead in found["launches"]]
    assert launches.count((True, True)) > len(launches) / 2
    assert (False, True) in launches  # a prompt that joined
    assert launches.count((True, False)) + launches.count((False, False)) <= 3


def test_slice_is_deferred_until_its_blocks_are_loaded(computed: Computed) -> None:
    load = computed.results["load"]
    token = computed.prompts["mixed"][-2].reference_tokens[0]
    assert load["is_deferred"] == [False, True, False]
    assert load["tokens"] == [token, None, token]


def test_special_rows_equal_those_of_the_model_engine(computed: Computed) -> None:
    """Logit bias, penalties, logprobs of outputs and of prompts."""
    (tokens, logprobs), (wanted_tokens, wanted_logprobs) = (
        computed.results["special"],
        computed.results["wanted_special"],
    )
    assert tokens == wanted_tokens
    assert len(logprobs) > 80
    assert logprobs == pytest.approx(wanted_logprobs, abs=1e-4)


def test_copied_block_continues_the_prefix_after_a_warm_up(computed: Computed) -> None:
    """The warm-up could capture no graphs, so that the engine launches every kernel by itself."""
    assert computed.results["has_graphs"] is False
    wanted = computed.prompts["mixed"][LENGTHS["mixed"].index(16)].reference_tokens
    assert computed.results["copied"] == list(wanted)


def test_damaged_cache_is_reported(computed: Computed) -> None:
    assert computed.results["is_damage_reported"] is True
