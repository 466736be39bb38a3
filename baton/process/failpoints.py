"""Named points where tests inject faults.

They are armed by BATON_FAILPOINTS or, in a cluster with `--failpoints-rpc`, by the node link.
Grammar, with entries separated by `;`:

    NAME=ACTION[(ARGUMENT)][@PROBABILITY][+SKIP][*TIMES]

    transfer.write.before=delay(0.5)*1          half a second, once
    decode.commit.before=error@0.1              HandoffFailed in one of ten hits
    prefill.layer.after=exit+3                  the fourth hit ends the process

Actions: delay(seconds), error, drop, duplicate, corrupt, exit, stop (SIGSTOP to itself). `hit`
returns `drop`, `duplicate` and `corrupt` for the call site to carry out; KNOWN_FAILPOINTS says
which sites can. `failpoint(NAME)` puts NAME.before and NAME.after around a block or a function.
What each request or step runs through looks at `FAILPOINTS.armed` first, so that nothing is called
unless something is armed.
"""

import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


# For points where an operation cannot fail.
_NON_FAILING_ACTIONS = frozenset(
    {FailpointAction.DELAY, FailpointAction.EXIT, FailpointAction.STOP}
)
_BASIC_ACTIONS = _NON_FAILING_ACTIONS | {FailpointAction.ERROR}
_FRAME_ACTIONS = _BASIC_ACTIONS | {
    FailpointAction.DROP,
    FailpointAction.DUPLICATE,
    FailpointAction.CORRUPT,
}

# Every failpoint with the actions that its call site supports. A test hits each of them.
KNOWN_FAILPOINTS: dict[str, frozenset[FailpointAction]] = {
    # Before each piece of a cache that is allocated while the node serves.
    "cache.allocate.before": frozenset({FailpointAction.DELAY}),
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
    # Holds the next layer until this one has landed.
    "prefill.layer.landed": frozenset({FailpointAction.DELAY}),
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
    "pool.copy.before": _BASIC_ACTIONS
    | {FailpointAction.CORRUPT},  # in a publishing node, per block
    "pool.find.before": _NON_FAILING_ACTIONS,  # in the pool, like the next two
    "pool.seal.before": _NON_FAILING_ACTIONS,
    "pool.seal.after": _NON_FAILING_ACTIONS,
    "pool.promote.before": _BASIC_ACTIONS,  # in the pool that fetches blocks
    "pool.send.before": _BASIC_ACTIONS,  # in the pool that sends them, once they are pinned
    "pool.disk.read": _BASIC_ACTIONS,  # per block; an error counts as a disk error
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
    times_left: int  # -1 is unlimited


class Failpoints:
    """The armed failpoints of one process. Thread-safe."""

    def __init__(self, spec: str = "", seed: int = 0) -> None:
        self.armed: dict[str, _ArmedFailpoint] = {}  # by name; replaced, never changed
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._delays_released = threading.Event()
        self.arm(spec)

    def arm(self, spec: str) -> None:
        """Replace the armed failpoints. Raises ConfigError that names the invalid entry."""
        parsed = dict(_parse_entry(entry.strip()) for entry in spec.split(";") if entry.strip())
        with self._lock:
            self.armed = parsed

    def set_seed(self, seed: int) -> None:
        self._random.seed(seed)

    def release_delays(self) -> None:
        """End all present and future delays."""
        self._delays_released.set()

    def hit(self, name: str) -> FailpointAction | None:
        """Log and carry out the armed action, if there is one, on the calling thread.

        Returns DROP, DUPLICATE or CORRUPT for the caller to carry out, else None. Raises
        HandoffFailed for the action `error`.
        """
        if not self.armed:
            return None
        armed = self._consume_hit(name)
        if armed is None:
            return None
        _log.warning("failpoint triggered", point=name, action=armed.action.value)
        match armed.action:
            case FailpointAction.DELAY:
                self._delays_released.wait(armed.argument)
            case FailpointAction.ERROR:
                raise HandoffFailed(f"failpoint {name}")
            case FailpointAction.EXIT:
                os._exit(70)
            case FailpointAction.STOP:
                # Sent to this thread, which then runs no further instruction. A signal to the
                # process may be delivered to another thread first.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case frame_action:
                return frame_action
        return None

    def get_argument(self, name: str) -> float | None:
        """Return the argument of a failpoint for a site that interprets it; None if not armed."""
        armed = self.armed.get(name)
        return armed.argument if armed is not None else None

    def _consume_hit(self, name: str) -> _ArmedFailpoint | None:
        with self._lock:
            armed = self.armed.get(name)
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


FAILPOINTS = Failpoints()  # those of this process


@contextmanager
def failpoint(name: str) -> Iterator[None]:
    """Hit `name`.before on entry and `name`.after on exit, unless the body raises.

    For points of this process whose actions need nothing of the call site. Works as a decorator,
    too. Raises what `Failpoints.hit` raises.
    """
    FAILPOINTS.hit(f"{name}.before")
    yield
    FAILPOINTS.hit(f"{name}.after")


def arm_from_environment() -> None:
    """Arm BATON_FAILPOINTS with BATON_FAILPOINTS_SEED. Raises ConfigError for invalid values."""
    seed = os.environ.get("BATON_FAILPOINTS_SEED", "0")
    if not seed.isdecimal():
        raise ConfigError(f"BATON_FAILPOINTS_SEED is {seed!r}: it must be a number")
    FAILPOINTS.set_seed(int(seed))
    FAILPOINTS.arm(os.environ.get("BATON_FAILPOINTS", ""))
