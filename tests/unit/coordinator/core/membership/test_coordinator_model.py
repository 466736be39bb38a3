"""A node's model against the coordinator's own."""

from dataclasses import replace
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.models.file_digests import ModelFileDigests
from baton.types import Incarnation
from coordinator.core.brain import Brain
from coordinator.core.common.settings import BrainSettings
from coordinator.core.membership.join_checks import ServedModel
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.policies import LeastLoadedPolicy
from simulator.node_messages import make_join_info
from tests.unit.coordinator.core.brain_harness import (
    DECODE,
    SILENCE,
    STALL,
)

FILES = ModelFileDigests(config_digest="c0", tokenizer_digest="t0", weights_digest="w0")


SERVED = ServedModel("model", FILES)


def brain_of(served: ServedModel) -> Brain:
    return Brain(
        NodeRegistry(SILENCE, STALL, served),
        LeastLoadedPolicy(),
        BrainSettings(mode="colocated", max_queue=8, max_attempts=3, reserve_timeout=STALL),
    )


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("engine", {"engine": "paced"}),
        ("config_digest", {"files": replace(FILES, config_digest="c1")}),
        ("tokenizer_digest", {"files": replace(FILES, tokenizer_digest="t1")}),
        ("weights_digest", {"files": replace(FILES, weights_digest="w1")}),
    ],
)
def test_node_with_other_model_than_coordinator_is_rejected(
    field: str, changes: dict[str, Any]
) -> None:
    brain = brain_of(SERVED)
    info = replace(make_join_info("d0", DECODE, engine="model", files=FILES), **changes)
    with pytest.raises(
        ConfigError, match=rf"has {field} .*the coordinator's --model has .*: start"
    ) as caught:
        brain.join_node(info, Incarnation("d0#1"), 0.0)
    assert caught.value.param == field
    assert brain.counters.joins == {"refused": 1}


@pytest.mark.parametrize(
    ("served", "files"),
    [
        (SERVED, FILES),
        (
            SERVED,
            ModelFileDigests(config_digest="c0"),
        ),  # no tokenizer files beside the node's weights
        (
            ServedModel("model", ModelFileDigests("c0", "t0")),
            FILES,
        ),  # no weights beside the coordinator's tokenizer
        (ServedModel(), ModelFileDigests("c9", "t9", "w9")),  # a coordinator without a model
    ],
)
def test_unknown_model_facts_are_not_compared(served: ServedModel, files: ModelFileDigests) -> None:
    brain = brain_of(served)
    brain.join_node(
        make_join_info("d0", DECODE, engine="model", files=files), Incarnation("d0#1"), 0.0
    )
    assert brain.counters.joins == {"joined": 1}
