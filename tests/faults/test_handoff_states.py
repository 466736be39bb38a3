"""Kill, freeze or restart each process while a KV transfer is in each state of either side.

A failpoint holds each state long enough for the fault to be injected in it. One fault can delay the
request but not break it: it ends with the reference's tokens, unless the coordinator dies, and all
its blocks are released. Requests have one choice, several choices, or ask for echo and scores.
"""

import asyncio
import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from baton.cli.supervisor.child_specs import COORDINATOR
from kv_transfer.core.inbound_handoff import InboundState
from kv_transfer.core.outbound_handoff import OutboundState
from tests.chaos.faults import Fault, FreezeProcess, KillProcess, RestartProcess
from tests.faults.observed_cluster import ObservedCluster, PendingCall, make_call
from tests.history import ClientApi, ClientCall, Closed

HOLD_SECONDS = 0.6  # seconds
# Longer than the timeouts of nodes and tickets in tests/proxied_cluster.py:SHORT_TIMEOUTS.
FAULT_SECONDS = 1.4
State = InboundState | OutboundState


@dataclass(frozen=True, slots=True)
class StateFailpoint:
    """A failpoint on processes whose name begins with `process` that holds a state."""

    process: str
    spec: str


FAILPOINT_BY_STATE: dict[State, StateFailpoint] = {
    OutboundState.UNTICKETED: StateFailpoint(
        "decode", f"decode.allocate.before=delay({HOLD_SECONDS})*1"
    ),
    OutboundState.STREAMING: StateFailpoint(
        "prefill", f"transfer.write.before=delay({HOLD_SECONDS})+2*1"
    ),
    OutboundState.SEALED: StateFailpoint("decode", f"decode.commit.before=delay({HOLD_SECONDS})*1"),
    OutboundState.COMMITTED: StateFailpoint(
        "prefill", f"prefill.free.before=delay({HOLD_SECONDS})*1"
    ),
    OutboundState.ABORTED: StateFailpoint(
        "prefill", f"transfer.write.before=error*1;prefill.free.before=delay({HOLD_SECONDS})*1"
    ),
    InboundState.GRANTED: StateFailpoint(
        "prefill", f"transfer.write.before=delay({HOLD_SECONDS})*1"
    ),
    InboundState.WRITING: StateFailpoint(
        "decode", f"transfer.land.before=delay({HOLD_SECONDS})+3*1"
    ),
    InboundState.SEALED: StateFailpoint("decode", f"decode.commit.before=delay({HOLD_SECONDS})*1"),
    InboundState.COMMITTED: StateFailpoint(
        "decode", f"decode.commit.after=delay({HOLD_SECONDS})*1"
    ),
    InboundState.QUARANTINED: StateFailpoint(
        "prefill", "transfer.write.after=delay(5.0)*1"
    ),  # locked, beyond its ticket's time
    InboundState.LOST: StateFailpoint(
        "decode", f"transfer.land.before=error*1;decode.free.before=delay({HOLD_SECONDS})*1"
    ),
}
TRANSIENT_STATES = {
    InboundState.SEALING: (
        "a writer releases its lock before it sends Seal; only a broken one stays in this state"
    ),
    OutboundState.ABORTING: (
        "the thread that aborts makes the reads itself; none is in flight when it checks"
    ),
}
FAULTS = {"kill": KillProcess, "freeze": FreezeProcess, "restart": RestartProcess}
VICTIMS = (COORDINATOR, "prefill-0", "decode-0", "decode-1")
CASES = list(itertools.product(FAILPOINT_BY_STATE, FAULTS, VICTIMS))
ONE_SIDED = {
    InboundState.QUARANTINED
}  # no block is ever, where the bytes land by decode's own hand
DEFAULT_CASES_OVER_GRPC = 4


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "state" not in metafunc.fixturenames:
        return
    rng = random.Random(metafunc.config.getoption("--chaos-seed"))
    some = [
        (state, rng.choice(tuple(FAULTS)), rng.choice(VICTIMS)) for state in FAILPOINT_BY_STATE
    ]  # the others are thorough
    cases = CASES
    if "observed_over_grpc" in metafunc.fixturenames:
        some = rng.sample(
            [case for case in some if case[0] not in ONE_SIDED], DEFAULT_CASES_OVER_GRPC
        )
        cases = [case for case in CASES if case[0] not in ONE_SIDED]
    metafunc.parametrize(
        ("state", "fault", "victim"), [_case(*case, thorough=case not in some) for case in cases]
    )


def _case(state: State, fault: str, victim: str, *, thorough: bool) -> Any:
    marks = [pytest.mark.thorough] if thorough else []
    return pytest.param(
        state,
        fault,
        victim,
        marks=marks,
        id=f"{type(state).__name__}.{state.name}-{fault}-{victim}",
    )


def test_every_state_is_covered() -> None:
    assert set(FAILPOINT_BY_STATE) | set(TRANSIENT_STATES) == set(InboundState) | set(OutboundState)
    assert not set(FAILPOINT_BY_STATE) & set(TRANSIENT_STATES)


def _make_call(state: State, fault: str, victim: str, turn: int) -> ClientCall:
    """Return a call with a prompt that no node has cached: one output, several, or one with
    logprobs."""
    one = make_call(
        ClientApi.SSE, 100, 12, salt=2000 + 1000 * turn + CASES.index((state, fault, victim))
    )
    kinds = (one, replace(one, n=3), replace(one, api=ClientApi.GRPC_STREAM, echo=True, logprobs=2))
    return kinds[
        (list(FAILPOINT_BY_STATE).index(state) + list(FAULTS).index(fault) + VICTIMS.index(victim))
        % len(kinds)
    ]


@pytest.mark.asyncio(loop_scope="session")
async def test_fault_in_a_handoff_state(
    observed: ObservedCluster, state: State, fault: str, victim: str
) -> None:
    await _run_case(observed, state, fault, victim)


@pytest.mark.asyncio(loop_scope="session")
async def test_fault_in_a_handoff_state_over_grpc(
    observed_over_grpc: ObservedCluster, state: State, fault: str, victim: str
) -> None:
    await _run_case(observed_over_grpc, state, fault, victim)


async def _hold_in_state(
    observed: ObservedCluster, state: State, fault: str, victim: str
) -> PendingCall:
    """Return a request whose hand-off is in the state.

    On a busy machine a request may be served without a hand-off, or before this process observes
    the state. Then another one is sent."""

    async def quarantined() -> bool:
        return any(ledger.quarantined for ledger in (await observed.cluster.get_ledgers()).ledgers)

    turns = itertools.count()
    while True:
        trap = await observed.arm_failpoints(
            FAILPOINT_BY_STATE[state].process, FAILPOINT_BY_STATE[state].spec
        )
        asked = observed.start_call(_make_call(state, fault, victim, next(turns)))
        there = quarantined if state is InboundState.QUARANTINED else trap.has_hit
        if await observed.wait_until_or_end(asked, f"a hand-off is {state.value}", there):
            return asked


async def _run_case(observed: ObservedCluster, state: State, fault: str, victim: str) -> None:
    asked = await _hold_in_state(observed, state, fault, victim)
    strike: Fault = FAULTS[fault](victim)
    await strike.inject(observed.cluster)
    if fault == "kill":
        observed.cluster.start_missing()
    else:
        await asyncio.sleep(FAULT_SECONDS)
    await strike.remove(observed.cluster)
    observed.cluster.start_missing()
    observed.was_coordinator_killed = COORDINATOR in strike.killed_processes
    end = (await asked.wait_end()).end
    assert COORDINATOR in strike.victims or end == Closed(is_orderly=True), asked.operation.events[
        -1
    ]
