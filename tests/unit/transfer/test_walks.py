"""Random walks through larger worlds than exploration can exhaust: the same rules, the same bugs to be found. More of
everything: blocks, chunks and faults, messages of many sizes, a narrow window, and acknowledgements that take their
time."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kv_transfer.core.departure import Pace
from tests.unit.transfer.model import World
from tests.unit.transfer.setting import SLAB, Setting

_QUIET = 5_000  # steps: more than any walk needs to come to its end


@st.composite
def worlds(draw: st.DrawFn) -> Setting:
    held, blocks = draw(st.integers(0, 2)), draw(st.integers(1, 5))
    chunks, left = [], held + blocks
    while left:
        chunks.append(draw(st.integers(1, left)))
        left -= chunks[-1]
    return Setting(
        layers=draw(st.integers(1, 4)),
        blocks=blocks,
        held=held,
        chunks=tuple(chunks),
        one_sided=draw(st.booleans()),
        faults=draw(st.integers(0, 4)),
        endings=draw(st.integers(0, 3)),
        slow_acks=draw(st.booleans()),
        pace=Pace(
            max_payload=SLAB * draw(st.integers(1, 8)),
            layers_per_message=draw(st.integers(0, 3)),
            window=SLAB * draw(st.integers(1, 16)),
            renew_interval=1.0,
            answer_timeout=1.0,
        ),
    )


class Walk(RuleBasedStateMachine):
    world: World

    @initialize(setting=worlds())
    def begin(self, setting: Setting) -> None:
        self.world = World.start(setting)

    @rule(choice=st.integers(0, 2**16), times=st.integers(1, 5))
    def happen(self, choice: int, times: int) -> None:
        for _ in range(times):
            actions = self.world.actions()
            if actions:
                self.world.act(*actions[choice % len(actions)])

    def teardown(self) -> None:
        """Whatever happened: left alone, everything ends, and nothing is held."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.endings, world.faults = world.setting.endings, world.setting.faults
        for step in range(_QUIET):
            actions = world.actions()
            if not actions:
                world.check_quiescent()
                return
            world.act(*actions[step % len(actions)])
        raise AssertionError(f"no end after {_QUIET} steps; still possible: {actions}")


Walk.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestWalk = Walk.TestCase
