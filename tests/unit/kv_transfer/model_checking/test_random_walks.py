"""Random walks through worlds that are too large to explore exhaustively, with the same invariants.

They have more blocks, chunks and faults, messages of many sizes, narrow windows and slow
acknowledgements.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kv_transfer.core.send_queue import SendSettings
from tests.unit.kv_transfer.model_checking.scenario import SLAB_BYTES, Scenario
from tests.unit.kv_transfer.model_checking.world import HandoffWorld

_MAX_DRAIN_STEPS = 5_000  # more than any walk needs to end


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    held_blocks, blocks = draw(st.integers(0, 2)), draw(st.integers(1, 5))
    chunks, left = [], held_blocks + blocks
    while left:
        chunks.append(draw(st.integers(1, left)))
        left -= chunks[-1]
    return Scenario(
        num_layers=draw(st.integers(1, 4)),
        num_blocks=blocks,
        blocks_held_by_decode=held_blocks,
        blocks_per_chunk=tuple(chunks),
        is_one_sided=draw(st.booleans()),
        max_faults=draw(st.integers(0, 4)),
        max_endings=draw(st.integers(0, 3)),
        has_slow_acks=draw(st.booleans()),
        send_settings=SendSettings(
            max_payload_bytes=SLAB_BYTES * draw(st.integers(1, 8)),
            layers_per_message=draw(st.integers(0, 3)),
            window_bytes=SLAB_BYTES * draw(st.integers(1, 16)),
            renew_interval=1.0,
            answer_timeout=1.0,
        ),
    )


class RandomWalk(RuleBasedStateMachine):
    world: HandoffWorld

    @initialize(scenario=scenarios())
    def create_world(self, scenario: Scenario) -> None:
        self.world = HandoffWorld.create(scenario)

    @rule(choice=st.integers(0, 2**16), times=st.integers(1, 5))
    def apply_random_actions(self, choice: int, times: int) -> None:
        for _ in range(times):
            actions = self.world.list_actions()
            if actions:
                self.world.apply_action(*actions[choice % len(actions)])

    def teardown(self) -> None:
        """Without further faults every hand-off ends, and no blocks are held."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.endings, world.faults = world.scenario.max_endings, world.scenario.max_faults
        for step in range(_MAX_DRAIN_STEPS):
            actions = world.list_actions()
            if not actions:
                world.check_quiescent()
                return
            world.apply_action(*actions[step % len(actions)])
        raise AssertionError(f"not ended after {_MAX_DRAIN_STEPS} steps; possible: {actions}")


RandomWalk.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestRandomWalk = pytest.mark.slow(RandomWalk.TestCase)
