"""Named points where a test may make Baton misbehave. Unarmed, a hit costs one dictionary look-up.

Armed by BATON_FAILPOINTS or, when the cluster runs with `--failpoints-rpc`, by the control stream.
Grammar, entries separated by `;`:

    NAME=ACTION[(ARGUMENT)][@PROBABILITY][+SKIP][*TIMES]

    transfer.write.before=delay(0.5)*1          once, half a second
    decode.commit.before=error@0.1              one in ten, HandoffFailed
    prefill.layer.after=exit+3                  the fourth hit kills the process

Actions: delay(seconds), error, drop, duplicate, corrupt, exit, stop (SIGSTOP to itself). `drop`,
`duplicate` and `corrupt` are returned for the call site to carry out; a site that cannot refuses to
be armed with them.
"""

import os
import random
import re
import signal
import threading
from dataclasses import dataclass
from enum import Enum

from baton.errors import ConfigError, HandoffFailed
from baton.process import log

_log = log.get_logger("failpoints")


class FailpointAction(Enum):
    DELAY = "delay"
    ERROR = "error"
    DROP = "drop"
    DUPLICATE = "duplicate"
    CORRUPT = "corrupt"
    EXIT = "exit"
    STOP = "stop"


_NON_FAILING_ACTIONS = frozenset(
    {FailpointAction.DELAY, FailpointAction.EXIT, FailpointAction.STOP}
)  # where nothing may fail, only end or wait
_BASIC_ACTIONS = _NON_FAILING_ACTIONS | {FailpointAction.ERROR}
_FRAME_ACTIONS = _BASIC_ACTIONS | {
    FailpointAction.DROP,
    FailpointAction.DUPLICATE,
    FailpointAction.CORRUPT,
}

# Every point there is, and what it can do. A test walks this table.
KNOWN_FAILPOINTS: dict[str, frozenset[FailpointAction]] = {
    "decode.allocate.before": _BASIC_ACTIONS,
    "decode.allocate.after": _BASIC_ACTIONS,
    "decode.commit.before": _BASIC_ACTIONS,
    "decode.commit.after": _NON_FAILING_ACTIONS,
    "decode.first_token.before": _NON_FAILING_ACTIONS,
    "decode.first_token.after": _NON_FAILING_ACTIONS,
    "decode.step.before": _BASIC_ACTIONS,
    "decode.step.after": _BASIC_ACTIONS,
    "decode.free.before": _NON_FAILING_ACTIONS,
    "decode.free.after": _NON_FAILING_ACTIONS,
    "prefill.allocate.before": _BASIC_ACTIONS,
    "prefill.allocate.after": _BASIC_ACTIONS,
    "prefill.layer.before": _BASIC_ACTIONS,
    "prefill.layer.after": _BASIC_ACTIONS,
    "prefill.layer.landed": frozenset(
        {FailpointAction.DELAY}
    ),  # hold the next layer until this one has landed
    "prefill.seal.before": _BASIC_ACTIONS,
    "prefill.seal.after": _NON_FAILING_ACTIONS,
    "prefill.free.before": _NON_FAILING_ACTIONS,
    "prefill.free.after": _NON_FAILING_ACTIONS,
    "transfer.write.before": _FRAME_ACTIONS,
    "transfer.write.after": _BASIC_ACTIONS,
    "transfer.land.before": _FRAME_ACTIONS,
    "transfer.land.after": _BASIC_ACTIONS,
    "transfer.seal.before": _FRAME_ACTIONS,
    "transfer.seal.after": _BASIC_ACTIONS,
    "transfer.commit.before": _FRAME_ACTIONS,
    "transfer.commit.after": _BASIC_ACTIONS,
    "pool.copy.before": _BASIC_ACTIONS | {FailpointAction.CORRUPT},  # in a publisher, of one block
    "pool.find.before": _NON_FAILING_ACTIONS,  # in the pool, as the next two
    "pool.seal.before": _NON_FAILING_ACTIONS,
    "pool.seal.after": _NON_FAILING_ACTIONS,
    "pool.promote.before": _BASIC_ACTIONS,  # in the pool that fetches from another
    "pool.send.before": _BASIC_ACTIONS,  # in the other one, when it has pinned what it is to send
    "pool.disk.read": _BASIC_ACTIONS,  # of one block; an error is the disk's
    "pool.disk.write": _BASIC_ACTIONS | {FailpointAction.CORRUPT},
    "link.node.send": frozenset(
        {
            FailpointAction.DELAY,
            FailpointAction.DROP,
            FailpointAction.DUPLICATE,
            FailpointAction.EXIT,
        }
    ),
    "link.coordinator.send": frozenset(
        {
            FailpointAction.DELAY,
            FailpointAction.DROP,
            FailpointAction.DUPLICATE,
            FailpointAction.EXIT,
        }
    ),
}

_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_ENTRY = re.compile(
    r"(?P<name>[a-z_.]+)=(?P<action>[a-z]+)(\((?P<argument>"
    + _NUMBER
    + r")\))?(@(?P<probability>"
    + _NUMBER
    + r"))?"
    r"(\+(?P<skip>\d+))?(\*(?P<times>\d+))?$"
)


@dataclass(slots=True)
class _ArmedFailpoint:
    action: FailpointAction
    argument: float
    probability: float
    skips_left: int
    times_left: int  # left; -1 is unlimited


class Failpoints:
    """The armed points of one process. Thread-safe: points are hit on the event loop, compute and
    transfer threads."""

    def __init__(self, spec: str = "", seed: int = 0) -> None:
        self._armed: dict[str, _ArmedFailpoint] = {}
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._delays_released = threading.Event()
        self.arm(spec)

    def arm(self, spec: str) -> None:
        """Replace what is armed. Raises ConfigError naming the bad entry."""
        parsed = dict(_parse_entry(entry.strip()) for entry in spec.split(";") if entry.strip())
        with self._lock:
            self._armed = parsed

    def set_seed(self, seed: int) -> None:
        self._random.seed(seed)

    def release_delays(self) -> None:
        """End every delay, those that come later too."""
        self._delays_released.set()

    def is_armed(self, name: str) -> bool:
        return name in self._armed

    def hit(self, name: str) -> FailpointAction | None:
        """Act on the calling thread, and say so in the log first. Returns DROP, DUPLICATE or
        CORRUPT for the caller to carry out, else None."""
        if not self._armed:
            return None
        due = self._consume_hit(name)
        if due is None:
            return None
        _log.warning("failpoint", point=name, action=due.action.value)
        match due.action:
            case FailpointAction.DELAY:
                self._delays_released.wait(due.argument)
            case FailpointAction.ERROR:
                raise HandoffFailed(f"failpoint {name}")
            case FailpointAction.EXIT:
                os._exit(70)
            case FailpointAction.STOP:
                # To this very thread, which so does not run another instruction; sent to the
                # process, it might.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case frame_action:
                return frame_action
        return None

    def get_argument(self, name: str) -> float | None:
        """The argument of an armed point whose site gives it a meaning of its own; None if it is
        not armed."""
        armed = self._armed.get(name)
        return armed.argument if armed is not None else None

    def _consume_hit(self, name: str) -> _ArmedFailpoint | None:
        with self._lock:
            armed = self._armed.get(name)
            if armed is None or armed.times_left == 0:
                return None
            if armed.skips_left > 0:
                armed.skips_left -= 1
                return None
            if self._random.random() >= armed.probability:
                return None
            if armed.times_left > 0:
                armed.times_left -= 1
            return armed


def _parse_entry(entry: str) -> tuple[str, _ArmedFailpoint]:
    match = _ENTRY.match(entry)
    if match is None:
        raise ConfigError(
            f"failpoint {entry!r} is not NAME=ACTION[(ARGUMENT)][@PROBABILITY][+SKIP][*TIMES]"
        )
    name = match["name"]
    if name not in KNOWN_FAILPOINTS:
        raise ConfigError(
            f"there is no failpoint {name!r}: known are {', '.join(sorted(KNOWN_FAILPOINTS))}"
        )
    allowed = {action.value: action for action in KNOWN_FAILPOINTS[name]}
    if match["action"] not in allowed:
        raise ConfigError(
            f"failpoint {name} cannot {match['action']!r}: it can {', '.join(sorted(allowed))}"
        )
    return name, _ArmedFailpoint(
        action=allowed[match["action"]],
        argument=float(match["argument"] or 0.0),
        probability=float(match["probability"] or 1.0),
        skips_left=int(match["skip"] or 0),
        times_left=int(match["times"]) if match["times"] else -1,
    )


FAILPOINTS = Failpoints()  # of this process


def arm_from_environment() -> None:
    """BATON_FAILPOINTS and BATON_FAILPOINTS_SEED. Raises ConfigError naming the bad entry."""
    seed = os.environ.get("BATON_FAILPOINTS_SEED", "0")
    if not seed.isdecimal():
        raise ConfigError(f"BATON_FAILPOINTS_SEED is {seed!r}: it must be a number")
    FAILPOINTS.set_seed(int(seed))
    FAILPOINTS.arm(os.environ.get("BATON_FAILPOINTS", ""))
