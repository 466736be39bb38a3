"""A round: a load, and the faults that strike it. Everything about it follows from its seed."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from baton.cli.plan import COORDINATOR
from baton.failpoints import POINTS, Action
from baton.types import Role
from tests.chaos.faults import (
    Failpoint,
    Fault,
    Freeze,
    HalfClose,
    Intruder,
    Kill,
    Noise,
    Nothing,
    Reset,
    Restart,
    Storm,
    Strand,
)
from tests.fault_proxy import BOTH, Way, Weather
from tests.history import Call, Door, Reference, Scorer

TIMEOUT = 6.0  # seconds that a client allows an operation
SHORT, LONG = 0.4, 2.2  # seconds: within everybody's patience, and beyond it (tests/linked_cluster.py IMPATIENT)
LATEST_MOMENT = 200  # tokens
_DELAYS = (0.02, 0.2, LONG)
_POINTS = [point for point in sorted(POINTS) if not point.startswith("pool.")]  # these clusters have no pool
LONGEST_OUTPUT = 24
_OUTPUTS = (1, 2, 3, 8, 17, LONGEST_OUTPUT)
_GIVING_UP = 0.2  # share of calls whose client goes away
_CHOICES = (1, 1, 1, 1, 2, 4)
_STOPPED = 0.2  # share of calls with a stop id that comes, or does not
_SCORED = 0.3  # share of calls through gRPC that ask for scores, where they are known
_ECHOED = 0.3  # share of calls through gRPC that want the prompt back
_SECOND_FAULT = 0.25  # share of rounds in which two faults strike at once
_INTRUDER = 0.15  # share of rounds in which a node of another model comes as well


@dataclass(frozen=True, slots=True)
class Load:
    """What clients ask for: `prompt` draws one. `outputs` has the whole one of each, as reference. `scorer` is there if
    tokens depend on the context alone, and says how they are scored: any sampling and scores may then be asked for."""

    clients: int
    prompt: Callable[[random.Random], tuple[int, ...]]
    outputs: Reference
    scorer: Scorer | None = None

    def calls(self, seed: int) -> Iterator[Call]:
        """Without end, in the order in which clients make them."""
        rng = random.Random(f"calls {seed}")
        while True:
            yield self._call(rng)

    def _call(self, rng: random.Random) -> Call:
        door, prompt = rng.choice(list(Door)), self.prompt(rng)
        max_tokens = rng.choice(_OUTPUTS)
        after = within = None
        if rng.random() < _GIVING_UP:
            if door.streams and rng.random() < 0.5:
                after = rng.randint(1, max_tokens)
            else:
                within = rng.uniform(0.0, 0.3)
        call = Call(door, prompt, max_tokens, TIMEOUT, give_up_after=after, give_up_in=within, n=rng.choice(_CHOICES))
        if rng.random() < _STOPPED:
            call = replace(call, stop_ids=(rng.choice(self.outputs(prompt, LONGEST_OUTPUT)),))
        return call if self.scorer is None else self._scored(rng, call)

    @staticmethod
    def _scored(rng: random.Random, call: Call) -> Call:
        call = replace(call, seed=rng.choice((None, rng.getrandbits(62))))
        if call.door not in (Door.GRPC_STREAM, Door.GRPC_ONCE):
            return call
        logprobs = rng.choice((0, 1, 5)) if rng.random() < _SCORED else None
        return replace(call, logprobs=logprobs, echo=rng.random() < _ECHOED)


@dataclass(frozen=True, slots=True)
class Round:
    """Calls are made without a pause; the faults strike when the clients have received `moment` tokens and relent
    `lasts` seconds later; then the last calls are made."""

    seed: int
    faults: tuple[Fault, ...]
    moment: int
    lasts: float

    @property
    def victims(self) -> frozenset[str]:
        return frozenset().union(*(fault.victims for fault in self.faults))

    @property
    def killed(self) -> frozenset[str]:
        return frozenset().union(*(fault.killed for fault in self.faults))

    def __str__(self) -> str:
        return f"{' and '.join(map(str, self.faults))} after {self.moment} tokens, for {self.lasts:g} s"


def draw(seed: int, processes: Sequence[str], links: Sequence[str]) -> Round:
    """The round of a seed, in a cluster of these processes and links."""
    rng = random.Random(f"faults {seed}")
    faults = [_fault(rng, processes, links)]
    if rng.random() < _SECOND_FAULT:
        faults.append(_fault(rng, processes, links))
    # From a source of its own, so that a seed's other faults stay what they were. Without the coordinator or with noise
    # everywhere no member might be left to say which model is served.
    rng = random.Random(f"intruder {seed}")
    struck = frozenset[str]().union(*(fault.victims for fault in faults))
    if rng.random() < _INTRUDER and COORDINATOR not in struck and not any(isinstance(one, Noise) for one in faults):
        names = [name for name in processes if name != COORDINATOR] + ["intruder"]
        faults.insert(0, Intruder(rng.choice(names)))  # the last to relent: the others must not wait for its end
    return Round(seed, tuple(faults), rng.randrange(LATEST_MOMENT), rng.choice((SHORT, LONG)))


def _fault(rng: random.Random, processes: Sequence[str], links: Sequence[str]) -> Fault:
    process, link = rng.choice(processes), rng.choice(links)
    kind = rng.choices(
        ("failpoint", "kill", "freeze", "restart", "weather", "reset", "half-close", "strand", "noise", "nothing"),
        weights=(10, 4, 4, 2, 5, 2, 2, 2, 4, 1),
    )[0]
    match kind:
        case "failpoint":
            return _failpoint(rng, processes)
        case "kill":
            return Kill(process)
        case "freeze":
            return Freeze(process)
        case "restart":
            return Restart(process)
        case "weather":
            return Storm(link, _weather(rng), rng.choice((BOTH, (Way.THERE,), (Way.BACK,))))
        case "reset":
            return Reset(link, refuse=rng.random() < 0.5)
        case "half-close":
            return HalfClose(link, rng.choice(list(Way)))
        case "strand":
            return Strand(link)
        case "noise":
            return Noise(tuple((process, _noise(rng, process)) for process in processes))
        case _:
            return Nothing()


def _weather(rng: random.Random) -> Weather:
    return rng.choice(
        (
            Weather(blocked=True),
            Weather(delay=rng.choice(_DELAYS)),
            Weather(corrupt=rng.choice((0.02, 0.2, 1.0))),
            Weather(bandwidth=rng.choice((2_000, 50_000))),
        )
    )


def _failpoint(rng: random.Random, processes: Sequence[str]) -> Failpoint:
    point = rng.choice(_POINTS)
    action = rng.choice(sorted(POINTS[point], key=lambda action: action.value))
    argument = rng.choice(_DELAYS) if action is Action.DELAY else 0.0
    skip = rng.choice((0, 0, 1, 3, 8, 20))
    times = 1 if action is Action.STOP else rng.choice((1, 1, 2, 5))
    return Failpoint(rng.choice(places(point, processes)), point, action, argument, skip, times)


def _noise(rng: random.Random, process: str) -> str:
    """Half of the failpoints that a process passes, with what does not end it."""
    passed = [point for point in _POINTS if process in places(point, [process])]
    entries = []
    for point in rng.sample(passed, -(-len(passed) // 2)):
        action = rng.choice(sorted(POINTS[point] - {Action.EXIT, Action.STOP}, key=lambda action: action.value))
        argument = f"({rng.choice((0.005, 0.05))})" if action is Action.DELAY else ""
        entries.append(f"{point}={action.value}{argument}@{rng.choice((0.01, 0.05))}")
    return ";".join(entries)


def places(point: str, processes: Sequence[str]) -> list[str]:
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
