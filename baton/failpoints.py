"""Named points where a test may make Baton misbehave. Unarmed, a hit costs one dictionary look-up.

Armed by BATON_FAILPOINTS or, when the cluster runs with `--failpoints-rpc`, by the control stream. Grammar, entries
separated by `;`:

    NAME=ACTION[(ARGUMENT)][@PROBABILITY][+SKIP][*TIMES]

    transfer.write.before=delay(0.5)*1          once, half a second
    decode.commit.before=error@0.1              one in ten, HandoffFailed
    prefill.layer.after=exit+3                  the fourth hit kills the process

Actions: delay(seconds), error, drop, duplicate, corrupt, exit, stop (SIGSTOP to itself). `drop`, `duplicate` and
`corrupt` are returned for the call site to carry out; a site that cannot refuses to be armed with them.
"""

import os
import random
import re
import signal
import threading
from dataclasses import dataclass
from enum import Enum

from baton import log
from baton.errors import ConfigError, HandoffFailed

_log = log.get("failpoints")


class Action(Enum):
    DELAY = "delay"
    ERROR = "error"
    DROP = "drop"
    DUPLICATE = "duplicate"
    CORRUPT = "corrupt"
    EXIT = "exit"
    STOP = "stop"


_PASSING = frozenset({Action.DELAY, Action.EXIT, Action.STOP})  # where nothing may fail, only end or wait
_SIMPLE = _PASSING | {Action.ERROR}
_FRAME = _SIMPLE | {Action.DROP, Action.DUPLICATE, Action.CORRUPT}

# Every point there is, and what it can do. A test walks this table.
POINTS: dict[str, frozenset[Action]] = {
    "decode.allocate.before": _SIMPLE,
    "decode.allocate.after": _SIMPLE,
    "decode.commit.before": _SIMPLE,
    "decode.commit.after": _PASSING,
    "decode.first_token.before": _PASSING,
    "decode.first_token.after": _PASSING,
    "decode.step.before": _SIMPLE,
    "decode.step.after": _SIMPLE,
    "decode.free.before": _PASSING,
    "decode.free.after": _PASSING,
    "prefill.allocate.before": _SIMPLE,
    "prefill.allocate.after": _SIMPLE,
    "prefill.layer.before": _SIMPLE,
    "prefill.layer.after": _SIMPLE,
    "prefill.layer.landed": frozenset({Action.DELAY}),  # hold the next layer until this one has landed
    "prefill.seal.before": _SIMPLE,
    "prefill.seal.after": _PASSING,
    "prefill.free.before": _PASSING,
    "prefill.free.after": _PASSING,
    "transfer.write.before": _FRAME,
    "transfer.write.after": _SIMPLE,
    "transfer.land.before": _FRAME,
    "transfer.land.after": _SIMPLE,
    "transfer.seal.before": _FRAME,
    "transfer.seal.after": _SIMPLE,
    "transfer.commit.before": _FRAME,
    "transfer.commit.after": _SIMPLE,
    "pool.copy.before": _SIMPLE | {Action.CORRUPT},  # in a publisher, of one block
    "pool.find.before": _PASSING,  # in the pool, as the next two
    "pool.seal.before": _PASSING,
    "pool.seal.after": _PASSING,
    "pool.promote.before": _SIMPLE,  # in the pool that fetches from another
    "pool.send.before": _SIMPLE,  # in the other one, when it has pinned what it is to send
    "pool.disk.read": _SIMPLE,  # of one block; an error is the disk's
    "pool.disk.write": _SIMPLE | {Action.CORRUPT},
    "link.node.send": frozenset({Action.DELAY, Action.DROP, Action.DUPLICATE, Action.EXIT}),
    "link.coordinator.send": frozenset({Action.DELAY, Action.DROP, Action.DUPLICATE, Action.EXIT}),
}

_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_ENTRY = re.compile(
    r"(?P<name>[a-z_.]+)=(?P<action>[a-z]+)(\((?P<argument>" + _NUMBER + r")\))?(@(?P<probability>" + _NUMBER + r"))?"
    r"(\+(?P<skip>\d+))?(\*(?P<times>\d+))?$"
)


@dataclass(slots=True)
class _Armed:
    action: Action
    argument: float
    probability: float
    skip: int
    times: int  # left; -1 is unlimited


class Failpoints:
    """The armed points of one process. Thread-safe: points are hit on the event loop, compute and transfer threads."""

    def __init__(self, spec: str = "", seed: int = 0) -> None:
        self._armed: dict[str, _Armed] = {}
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._resume = threading.Event()
        self.arm(spec)

    def arm(self, spec: str) -> None:
        """Replace what is armed. Raises ConfigError naming the bad entry."""
        parsed = dict(_parse(entry.strip()) for entry in spec.split(";") if entry.strip())
        with self._lock:
            self._armed = parsed

    def seed(self, seed: int) -> None:
        self._random.seed(seed)

    def resume(self) -> None:
        """End every delay, those that come later too."""
        self._resume.set()

    def armed(self, name: str) -> bool:
        return name in self._armed

    def hit(self, name: str) -> Action | None:
        """Act on the calling thread, and say so in the log first. Returns DROP, DUPLICATE or CORRUPT for the caller to
        carry out, else None."""
        if not self._armed:
            return None
        due = self._due(name)
        if due is None:
            return None
        _log.warning("failpoint", point=name, action=due.action.value)
        match due.action:
            case Action.DELAY:
                self._resume.wait(due.argument)
            case Action.ERROR:
                raise HandoffFailed(f"failpoint {name}")
            case Action.EXIT:
                os._exit(70)
            case Action.STOP:
                # To this very thread, which so does not run another instruction; sent to the process, it might.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case frame_action:
                return frame_action
        return None

    def argument(self, name: str) -> float | None:
        """The argument of an armed point whose site gives it a meaning of its own; None if it is not armed."""
        armed = self._armed.get(name)
        return armed.argument if armed is not None else None

    def _due(self, name: str) -> _Armed | None:
        with self._lock:
            armed = self._armed.get(name)
            if armed is None or armed.times == 0:
                return None
            if armed.skip > 0:
                armed.skip -= 1
                return None
            if self._random.random() >= armed.probability:
                return None
            if armed.times > 0:
                armed.times -= 1
            return armed


def _parse(entry: str) -> tuple[str, _Armed]:
    match = _ENTRY.match(entry)
    if match is None:
        raise ConfigError(f"failpoint {entry!r} is not NAME=ACTION[(ARGUMENT)][@PROBABILITY][+SKIP][*TIMES]")
    name = match["name"]
    if name not in POINTS:
        raise ConfigError(f"there is no failpoint {name!r}: known are {', '.join(sorted(POINTS))}")
    allowed = {action.value: action for action in POINTS[name]}
    if match["action"] not in allowed:
        raise ConfigError(f"failpoint {name} cannot {match['action']!r}: it can {', '.join(sorted(allowed))}")
    return name, _Armed(
        action=allowed[match["action"]],
        argument=float(match["argument"] or 0.0),
        probability=float(match["probability"] or 1.0),
        skip=int(match["skip"] or 0),
        times=int(match["times"]) if match["times"] else -1,
    )


FAILPOINTS = Failpoints()  # of this process


def arm_from_environment() -> None:
    """BATON_FAILPOINTS and BATON_FAILPOINTS_SEED. Raises ConfigError naming the bad entry."""
    seed = os.environ.get("BATON_FAILPOINTS_SEED", "0")
    if not seed.isdecimal():
        raise ConfigError(f"BATON_FAILPOINTS_SEED is {seed!r}: it must be a number")
    FAILPOINTS.seed(int(seed))
    FAILPOINTS.arm(os.environ.get("BATON_FAILPOINTS", ""))
