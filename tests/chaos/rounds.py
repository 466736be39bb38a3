"""A chaos round: a load, and the faults injected into it. All of it follows from its seed."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from baton.cli.supervisor.child_specs import COORDINATOR
from baton.process.failpoints import KNOWN_FAILPOINTS, FailpointAction
from baton.types import Role
from tests.chaos.faults import (
    ArmFailpoint,
    DegradeLink,
    Fault,
    FreezeProcess,
    HalfCloseLink,
    JoinMismatchedNode,
    KillProcess,
    NoFault,
    RandomFailpoints,
    ResetLink,
    RestartProcess,
    StrandLink,
)
from tests.fault_proxy import BOTH_DIRECTIONS, Direction, LinkConditions
from tests.history import ClientApi, ClientCall
from tests.history_checks import Reference, Scorer

TIMEOUT_SECONDS = 6.0  # seconds that a client allows an operation
# Shorter and longer than the timeouts of tests/proxied_cluster.py:SHORT_TIMEOUTS.
SHORT_FAULT_SECONDS, LONG_FAULT_SECONDS = 0.4, 2.2
MAX_STRIKE_AFTER_TOKENS = 200  # tokens
_DELAYS = (0.02, 0.2, LONG_FAULT_SECONDS)
_POINTS = [
    point for point in sorted(KNOWN_FAILPOINTS) if not point.startswith("pool.")
]  # these clusters have no pool
LONGEST_OUTPUT = 24
_OUTPUTS = (1, 2, 3, 8, 17, LONGEST_OUTPUT)
_CANCELLED_SHARE = 0.2  # share of calls whose client goes away
_CHOICES = (1, 1, 1, 1, 2, 4)
_STOP_TOKEN_SHARE = 0.2  # share of calls with a stop id that comes, or does not
_LOGPROBS_SHARE = 0.3  # share of calls through gRPC that ask for scores, where they are known
_ECHO_SHARE = 0.3  # share of calls through gRPC that want the prompt back
_SECOND_FAULT_SHARE = 0.25  # share of rounds in which two faults strike at once
_MISMATCHED_NODE_SHARE = 0.15  # share of rounds in which a node of another model comes as well


@dataclass(frozen=True, slots=True)
class ChaosLoad:
    """What the clients of a round ask for, and the right answers."""

    client_count: int
    draw_prompt: Callable[[random.Random], tuple[int, ...]]
    reference: Reference
    # Set if tokens depend on the context alone: calls may then use any sampling and logprobs.
    scorer: Scorer | None = None

    def generate_calls(self, seed: int) -> Iterator[ClientCall]:
        """An endless sequence of calls, in the order in which clients make them."""
        rng = random.Random(f"calls {seed}")
        while True:
            yield self._draw_call(rng)

    def _draw_call(self, rng: random.Random) -> ClientCall:
        api, prompt = rng.choice(list(ClientApi)), self.draw_prompt(rng)
        max_tokens = rng.choice(_OUTPUTS)
        after = within = None
        if rng.random() < _CANCELLED_SHARE:
            if api.is_streaming and rng.random() < 0.5:
                after = rng.randint(1, max_tokens)
            else:
                within = rng.uniform(0.0, 0.3)
        call = ClientCall(
            api,
            prompt,
            max_tokens,
            TIMEOUT_SECONDS,
            cancel_after_tokens=after,
            cancel_after_seconds=within,
            n=rng.choice(_CHOICES),
        )
        if rng.random() < _STOP_TOKEN_SHARE:
            call = replace(
                call, stop_token_ids=(rng.choice(self.reference(prompt, LONGEST_OUTPUT)),)
            )
        return call if self.scorer is None else self._add_scores(rng, call)

    @staticmethod
    def _add_scores(rng: random.Random, call: ClientCall) -> ClientCall:
        call = replace(call, seed=rng.choice((None, rng.getrandbits(62))))
        if call.api not in (ClientApi.GRPC_STREAM, ClientApi.GRPC_ONCE):
            return call
        logprobs = rng.choice((0, 1, 5)) if rng.random() < _LOGPROBS_SHARE else None
        return replace(call, logprobs=logprobs, echo=rng.random() < _ECHO_SHARE)


@dataclass(frozen=True, slots=True)
class ChaosRound:
    """A continuous load with faults that begin and end meanwhile."""

    seed: int
    faults: tuple[Fault, ...]
    strike_after_tokens: int  # the faults begin when the clients have received so many
    duration_seconds: float  # of the faults; then the last calls are made

    @property
    def victims(self) -> frozenset[str]:
        return frozenset().union(*(fault.victims for fault in self.faults))

    @property
    def killed_processes(self) -> frozenset[str]:
        return frozenset().union(*(fault.killed_processes for fault in self.faults))

    def __str__(self) -> str:
        moment = f"after {self.strike_after_tokens} tokens, for {self.duration_seconds:g} s"
        return f"{' and '.join(map(str, self.faults))} {moment}"


def draw_round(seed: int, processes: Sequence[str], links: Sequence[str]) -> ChaosRound:
    """The round of a seed, in a cluster of these processes and links."""
    rng = random.Random(f"faults {seed}")
    faults = [_draw_fault(rng, processes, links)]
    if rng.random() < _SECOND_FAULT_SHARE:
        faults.append(_draw_fault(rng, processes, links))
    # From a source of its own, so that a seed's other faults stay what they were. Without the
    # coordinator or with noise everywhere no member might be left to say which model is served.
    rng = random.Random(f"intruder {seed}")
    struck = frozenset[str]().union(*(fault.victims for fault in faults))
    if (
        rng.random() < _MISMATCHED_NODE_SHARE
        and COORDINATOR not in struck
        and not any(isinstance(one, RandomFailpoints) for one in faults)
    ):
        names = [name for name in processes if name != COORDINATOR] + ["intruder"]
        faults.insert(
            0, JoinMismatchedNode(rng.choice(names))
        )  # removed last: the others must not wait for its end
    return ChaosRound(
        seed,
        tuple(faults),
        rng.randrange(MAX_STRIKE_AFTER_TOKENS),
        rng.choice((SHORT_FAULT_SECONDS, LONG_FAULT_SECONDS)),
    )


def _draw_fault(rng: random.Random, processes: Sequence[str], links: Sequence[str]) -> Fault:
    process, link = rng.choice(processes), rng.choice(links)
    kind = rng.choices(
        (
            "failpoint",
            "kill",
            "freeze",
            "restart",
            "weather",
            "reset",
            "half-close",
            "strand",
            "noise",
            "nothing",
        ),
        weights=(10, 4, 4, 2, 5, 2, 2, 2, 4, 1),
    )[0]
    match kind:
        case "failpoint":
            return _draw_failpoint(rng, processes)
        case "kill":
            return KillProcess(process)
        case "freeze":
            return FreezeProcess(process)
        case "restart":
            return RestartProcess(process)
        case "weather":
            return DegradeLink(
                link,
                _draw_conditions(rng),
                rng.choice((BOTH_DIRECTIONS, (Direction.UPSTREAM,), (Direction.DOWNSTREAM,))),
            )
        case "reset":
            return ResetLink(link, refuses_new=rng.random() < 0.5)
        case "half-close":
            return HalfCloseLink(link, rng.choice(list(Direction)))
        case "strand":
            return StrandLink(link)
        case "noise":
            return RandomFailpoints(
                tuple((process, _draw_noise(rng, process)) for process in processes)
            )
        case _:
            return NoFault()


def _draw_conditions(rng: random.Random) -> LinkConditions:
    return rng.choice(
        (
            LinkConditions(is_blocked=True),
            LinkConditions(delay_seconds=rng.choice(_DELAYS)),
            LinkConditions(bit_flip_probability=rng.choice((0.02, 0.2, 1.0))),
            LinkConditions(bytes_per_second=rng.choice((2_000, 50_000))),
        )
    )


def _draw_failpoint(rng: random.Random, processes: Sequence[str]) -> ArmFailpoint:
    point = rng.choice(_POINTS)
    action = rng.choice(sorted(KNOWN_FAILPOINTS[point], key=lambda action: action.value))
    argument = rng.choice(_DELAYS) if action is FailpointAction.DELAY else 0.0
    skip = rng.choice((0, 0, 1, 3, 8, 20))
    times = 1 if action is FailpointAction.STOP else rng.choice((1, 1, 2, 5))
    return ArmFailpoint(
        rng.choice(list_processes(point, processes)), point, action, argument, skip, times
    )


def _draw_noise(rng: random.Random, process: str) -> str:
    """Half of the failpoints that a process passes, with what does not end it."""
    passed = [point for point in _POINTS if process in list_processes(point, [process])]
    entries = []
    for point in rng.sample(passed, -(-len(passed) // 2)):
        action = rng.choice(
            sorted(
                KNOWN_FAILPOINTS[point] - {FailpointAction.EXIT, FailpointAction.STOP},
                key=lambda action: action.value,
            )
        )
        argument = f"({rng.choice((0.005, 0.05))})" if action is FailpointAction.DELAY else ""
        entries.append(f"{point}={action.value}{argument}@{rng.choice((0.01, 0.05))}")
    return ";".join(entries)


def list_processes(point: str, processes: Sequence[str]) -> list[str]:
    """The processes that pass a failpoint."""
    match point.split("."):
        case ["link", "coordinator", _]:
            return [COORDINATOR]
        case ["link", "node", _]:
            return [process for process in processes if process != COORDINATOR]
        case ["transfer", "write" | "seal", _] | ["prefill", *_]:
            role = Role.PREFILL
        case _:
            role = Role.DECODE
    return [process for process in processes if process.startswith(role.value)]
