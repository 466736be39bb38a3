"""What can be done to a cluster, each with its undoing. Plain data, so that a round can be printed and replayed.

Two may strike at once: what the one has ended the other leaves alone.
"""

import asyncio
import contextlib
from dataclasses import dataclass

import grpc

from baton.cli.plan import COORDINATOR
from baton.failpoints import Action
from tests.fault_proxy import BOTH, Way, Weather
from tests.linked_cluster import LinkedCluster

_ORDERLY_END = 60.0  # seconds from SIGTERM
_ARMING = 1.0  # seconds


class Fault:
    """`victims` are the processes that may end because of it, `killed` those of them that end without a word."""

    @property
    def victims(self) -> frozenset[str]:
        return self.killed

    @property
    def killed(self) -> frozenset[str]:
        return frozenset()

    async def strike(self, cluster: LinkedCluster) -> None:
        pass

    async def relent(self, cluster: LinkedCluster) -> None:
        """Take the fault away. What it has ended is started again by `LinkedCluster.revive`."""


@dataclass(frozen=True)
class Nothing(Fault):
    """The control."""


@dataclass(frozen=True)
class Kill(Fault):
    process: str

    @property
    def killed(self) -> frozenset[str]:
        return frozenset({self.process})

    async def strike(self, cluster: LinkedCluster) -> None:
        if cluster.running(self.process):
            cluster.kill(self.process)


@dataclass(frozen=True)
class Intruder(Fault):
    """A node of another model wants to join under this name, which may be that of a live node. It is refused."""

    name: str

    async def strike(self, cluster: LinkedCluster) -> None:
        cluster.start_intruder(self.name)

    async def relent(self, cluster: LinkedCluster) -> None:
        await cluster.intruder_refused(within=_ORDERLY_END)


@dataclass(frozen=True)
class Restart(Fault):
    """SIGTERM, the orderly end, and a new start."""

    process: str

    @property
    def victims(self) -> frozenset[str]:
        return frozenset({self.process})

    async def strike(self, cluster: LinkedCluster) -> None:
        if cluster.running(self.process):
            cluster.terminate(self.process)

    async def relent(self, cluster: LinkedCluster) -> None:
        if cluster.running(self.process):
            cluster.cont(self.process)  # the other fault may have frozen it
        await cluster.ended(self.process, within=_ORDERLY_END)


@dataclass(frozen=True)
class Freeze(Fault):
    """SIGSTOP, then SIGCONT."""

    process: str

    async def strike(self, cluster: LinkedCluster) -> None:
        if cluster.running(self.process):
            cluster.stop(self.process)

    async def relent(self, cluster: LinkedCluster) -> None:
        if cluster.running(self.process):
            cluster.cont(self.process)


@dataclass(frozen=True)
class Failpoint(Fault):
    process: str
    point: str
    action: Action
    argument: float = 0.0
    skip: int = 0
    times: int = 1

    @property
    def spec(self) -> str:
        argument = f"({self.argument:g})" if self.argument else ""
        return f"{self.point}={self.action.value}{argument}+{self.skip}*{self.times}"

    @property
    def killed(self) -> frozenset[str]:
        return frozenset({self.process}) if self.action is Action.EXIT else frozenset()

    async def strike(self, cluster: LinkedCluster) -> None:
        await _arm(cluster, self.process, self.spec)

    async def relent(self, cluster: LinkedCluster) -> None:
        if self.action is Action.STOP and cluster.running(self.process):
            cluster.cont(self.process)
        await _arm(cluster, self.process, "")


@dataclass(frozen=True)
class Noise(Fault):
    """Many failpoints of every process at once, each of which acts now and then. `specs` by process."""

    specs: tuple[tuple[str, str], ...]

    async def strike(self, cluster: LinkedCluster) -> None:
        for process, spec in self.specs:
            await _arm(cluster, process, spec)

    async def relent(self, cluster: LinkedCluster) -> None:
        for process, _ in self.specs:
            await _arm(cluster, process, "")


@dataclass(frozen=True)
class Storm(Fault):
    """A link with bad weather."""

    link: str
    weather: Weather
    ways: tuple[Way, ...] = BOTH

    @property
    def victims(self) -> frozenset[str]:
        """gRPC's client (1.85.1) aborts its process on a GOAWAY with an error code that no standard names, which a
        flipped bit can make: a node may end by what comes from the coordinator, and is started again."""
        node, _, listener = self.link.partition(" -> ")
        risky = self.weather.corrupt > 0 and Way.BACK in self.ways and listener == COORDINATOR
        return frozenset({node}) if risky else frozenset()

    async def strike(self, cluster: LinkedCluster) -> None:
        cluster.links[self.link].weather(self.ways, self.weather)

    async def relent(self, cluster: LinkedCluster) -> None:
        await cluster.links[self.link].heal()


@dataclass(frozen=True)
class Reset(Fault):
    """Every connection of a link ends with RST; with `refuse`, new ones are refused."""

    link: str
    refuse: bool

    async def strike(self, cluster: LinkedCluster) -> None:
        if self.refuse:
            await cluster.links[self.link].refuse()
        else:
            cluster.links[self.link].reset()

    async def relent(self, cluster: LinkedCluster) -> None:
        await cluster.links[self.link].heal()


@dataclass(frozen=True)
class Strand(Fault):
    """Open connections of a link lead nowhere any more."""

    link: str

    async def strike(self, cluster: LinkedCluster) -> None:
        cluster.links[self.link].strand()


@dataclass(frozen=True)
class HalfClose(Fault):
    link: str
    way: Way

    async def strike(self, cluster: LinkedCluster) -> None:
        cluster.links[self.link].half_close(self.way)


async def _arm(cluster: LinkedCluster, process: str, spec: str) -> None:
    """Through the coordinator, if both are there: who is not has nothing armed."""
    with contextlib.suppress(grpc.RpcError, AssertionError, TimeoutError):
        async with asyncio.timeout(_ARMING):
            await cluster.arm(process, spec)
