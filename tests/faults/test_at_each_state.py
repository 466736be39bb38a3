"""Kill, freeze or restart each process while a hand-off stands in each state that either side of it can have.

Each state is held by a failpoint, long enough for the fault to strike there as soon as somebody has come to it. The
request under way, which one fault can delay and not break, ends with the reference's tokens (only the coordinator's own
death may end it), and every block comes back. It is one output, or several of one prompt, or asks for its prompt back
with scores.
"""

import asyncio
import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from baton.cli.plan import COORDINATOR
from kv_transfer.core.departure import DepartureState
from kv_transfer.core.landing import LandingState
from tests.chaos.faults import Fault, Freeze, Kill, Restart
from tests.faults.scene import Asked, Scene, call
from tests.history import Call, Closed, Door

HOLD = 0.6  # seconds
LASTS = 1.4  # seconds: longer than the coordinator's and the tickets' patience (tests/linked_cluster.py IMPATIENT)
State = LandingState | DepartureState


@dataclass(frozen=True, slots=True)
class Held:
    """A failpoint on processes whose name begins with `process` that makes hand-offs stay in a state."""

    process: str
    spec: str


HELD: dict[State, Held] = {
    DepartureState.SPECULATIVE: Held("decode", f"decode.allocate.before=delay({HOLD})*1"),
    DepartureState.STREAMING: Held("prefill", f"transfer.write.before=delay({HOLD})+2*1"),
    DepartureState.SEALED: Held("decode", f"decode.commit.before=delay({HOLD})*1"),
    DepartureState.COMMITTED: Held("prefill", f"prefill.free.before=delay({HOLD})*1"),
    DepartureState.ABORTED: Held("prefill", f"transfer.write.before=error*1;prefill.free.before=delay({HOLD})*1"),
    LandingState.GRANTED: Held("prefill", f"transfer.write.before=delay({HOLD})*1"),
    LandingState.WRITING: Held("decode", f"transfer.land.before=delay({HOLD})+3*1"),
    LandingState.SEALED: Held("decode", f"decode.commit.before=delay({HOLD})*1"),
    LandingState.COMMITTED: Held("decode", f"decode.commit.after=delay({HOLD})*1"),
    LandingState.QUARANTINED: Held("prefill", "transfer.write.after=delay(5.0)*1"),  # locked, beyond its ticket's time
    LandingState.LOST: Held("decode", f"transfer.land.before=error*1;decode.free.before=delay({HOLD})*1"),
}
PASSING = {
    LandingState.SEALING: "a writer drops its lock before it sends Seal: only one that is broken is found in it",
    DepartureState.ABORTING: "reads are made by the thread that aborts: none is in flight when it looks",
}
FAULTS = {"kill": Kill, "freeze": Freeze, "restart": Restart}
VICTIMS = (COORDINATOR, "prefill-0", "decode-0", "decode-1")
CASES = list(itertools.product(HELD, FAULTS, VICTIMS))
ONE_SIDED = {LandingState.QUARANTINED}  # no block is ever, where the bytes land by decode's own hand
SOME_OVER_GRPC = 4


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "state" not in metafunc.fixturenames:
        return
    rng = random.Random(metafunc.config.getoption("--chaos-seed"))
    some = [(state, rng.choice(tuple(FAULTS)), rng.choice(VICTIMS)) for state in HELD]  # the others are thorough
    cases = CASES
    if "grpc_scene" in metafunc.fixturenames:
        some = rng.sample([case for case in some if case[0] not in ONE_SIDED], SOME_OVER_GRPC)
        cases = [case for case in CASES if case[0] not in ONE_SIDED]
    metafunc.parametrize(("state", "fault", "victim"), [_case(*case, thorough=case not in some) for case in cases])


def _case(state: State, fault: str, victim: str, *, thorough: bool) -> Any:
    marks = [pytest.mark.thorough] if thorough else []
    return pytest.param(state, fault, victim, marks=marks, id=f"{type(state).__name__}.{state.name}-{fault}-{victim}")


def test_every_state_is_covered() -> None:
    assert set(HELD) | set(PASSING) == set(LandingState) | set(DepartureState)
    assert not set(HELD) & set(PASSING)


def _asked(state: State, fault: str, victim: str, turn: int) -> Call:
    """With a prompt that nobody holds yet: one output, several, or one with scores."""
    one = call(Door.SSE, 100, 12, salt=2000 + 1000 * turn + CASES.index((state, fault, victim)))
    kinds = (one, replace(one, n=3), replace(one, door=Door.GRPC_STREAM, echo=True, logprobs=2))
    return kinds[(list(HELD).index(state) + list(FAULTS).index(fault) + VICTIMS.index(victim)) % len(kinds)]


@pytest.mark.asyncio(loop_scope="session")
async def test_struck_in_a_state(scene: Scene, state: State, fault: str, victim: str) -> None:
    await _strike(scene, state, fault, victim)


@pytest.mark.asyncio(loop_scope="session")
async def test_struck_in_a_state_over_grpc(grpc_scene: Scene, state: State, fault: str, victim: str) -> None:
    await _strike(grpc_scene, state, fault, victim)


async def _caught(scene: Scene, state: State, fault: str, victim: str) -> Asked:
    """A request whose hand-off has come to the state. On a busy machine one may be served without: by decode alone, if
    prefill was not heard of for too long, or before this process has seen it. Then another asks."""

    async def quarantined() -> bool:
        return any(ledger.quarantined for ledger in (await scene.cluster.ledgers()).ledgers)

    turns = itertools.count()
    while True:
        trap = await scene.arm(HELD[state].process, HELD[state].spec)
        asked = scene.ask(_asked(state, fault, victim, next(turns)))
        there = quarantined if state is LandingState.QUARANTINED else trap.has_sprung
        if await scene.before_its_end(asked, f"a hand-off is {state.value}", there):
            return asked


async def _strike(scene: Scene, state: State, fault: str, victim: str) -> None:
    asked = await _caught(scene, state, fault, victim)
    strike: Fault = FAULTS[fault](victim)
    await strike.strike(scene.cluster)
    if fault == "kill":
        scene.cluster.revive()
    else:
        await asyncio.sleep(LASTS)
    await strike.relent(scene.cluster)
    scene.cluster.revive()
    scene.coordinator_died = COORDINATOR in strike.killed
    end = (await asked.over()).end
    assert COORDINATOR in strike.victims or end == Closed(in_order=True), asked.operation.events[-1]
