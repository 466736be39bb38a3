"""Faults that can be injected into a cluster and removed again.

They are plain data, so that a round can be printed and repeated. Two may be injected at once: what
one has ended, the other leaves alone.
"""

import asyncio
import contextlib
from dataclasses import dataclass

import grpc

from baton.cli.supervisor.child_specs import COORDINATOR
from baton.process.failpoints import FailpointAction
from tests.fault_proxy import BOTH_DIRECTIONS, Direction, LinkConditions
from tests.proxied_cluster import ProxiedCluster

_EXIT_TIMEOUT_SECONDS = 60.0  # seconds from SIGTERM
_ARMING_TIMEOUT_SECONDS = 1.0  # seconds


class Fault:
    """Base of all faults; it changes nothing."""

    @property
    def victims(self) -> frozenset[str]:
        """Processes that may end because of the fault."""
        return self.killed_processes

    @property
    def killed_processes(self) -> frozenset[str]:
        """Those of the victims that may end without an orderly stop."""
        return frozenset()

    async def inject(self, cluster: ProxiedCluster) -> None:
        pass

    async def remove(self, cluster: ProxiedCluster) -> None:
        """Remove the fault. `ProxiedCluster.start_missing` restarts what it has ended."""


@dataclass(frozen=True)
class NoFault(Fault):
    """No fault, as a control."""


@dataclass(frozen=True)
class KillProcess(Fault):
    process: str

    @property
    def killed_processes(self) -> frozenset[str]:
        return frozenset({self.process})

    async def inject(self, cluster: ProxiedCluster) -> None:
        if cluster.is_running(self.process):
            cluster.kill(self.process)


@dataclass(frozen=True)
class JoinMismatchedNode(Fault):
    """A node of another model tries to join under this name, maybe that of a live node."""

    name: str

    async def inject(self, cluster: ProxiedCluster) -> None:
        cluster.start_mismatched_node(self.name)

    async def remove(self, cluster: ProxiedCluster) -> None:
        await cluster.wait_mismatched_node_refused(within=_EXIT_TIMEOUT_SECONDS)


@dataclass(frozen=True)
class RestartProcess(Fault):
    """SIGTERM, and a new start once the process has ended."""

    process: str

    @property
    def victims(self) -> frozenset[str]:
        return frozenset({self.process})

    async def inject(self, cluster: ProxiedCluster) -> None:
        if cluster.is_running(self.process):
            cluster.terminate(self.process)

    async def remove(self, cluster: ProxiedCluster) -> None:
        if cluster.is_running(self.process):
            cluster.resume(self.process)  # the other fault may have frozen it
        await cluster.wait_for_exit(self.process, within=_EXIT_TIMEOUT_SECONDS)


@dataclass(frozen=True)
class FreezeProcess(Fault):
    """SIGSTOP, then SIGCONT."""

    process: str

    async def inject(self, cluster: ProxiedCluster) -> None:
        if cluster.is_running(self.process):
            cluster.freeze(self.process)

    async def remove(self, cluster: ProxiedCluster) -> None:
        if cluster.is_running(self.process):
            cluster.resume(self.process)


@dataclass(frozen=True)
class ArmFailpoint(Fault):
    process: str
    point: str
    action: FailpointAction
    argument: float = 0.0
    skip: int = 0
    times: int = 1

    @property
    def spec(self) -> str:
        argument = f"({self.argument:g})" if self.argument else ""
        return f"{self.point}={self.action.value}{argument}+{self.skip}*{self.times}"

    @property
    def killed_processes(self) -> frozenset[str]:
        return frozenset({self.process}) if self.action is FailpointAction.EXIT else frozenset()

    async def inject(self, cluster: ProxiedCluster) -> None:
        await _arm(cluster, self.process, self.spec)

    async def remove(self, cluster: ProxiedCluster) -> None:
        if self.action is FailpointAction.STOP and cluster.is_running(self.process):
            cluster.resume(self.process)
        await _arm(cluster, self.process, "")


@dataclass(frozen=True)
class RandomFailpoints(Fault):
    """Many failpoints of every process at once, each of which acts now and then. `specs` by
    process."""

    specs: tuple[tuple[str, str], ...]

    async def inject(self, cluster: ProxiedCluster) -> None:
        for process, spec in self.specs:
            await _arm(cluster, process, spec)

    async def remove(self, cluster: ProxiedCluster) -> None:
        for process, _ in self.specs:
            await _arm(cluster, process, "")


@dataclass(frozen=True)
class DegradeLink(Fault):
    """A link with delay, little bandwidth or flipped bits."""

    link: str
    conditions: LinkConditions
    directions: tuple[Direction, ...] = BOTH_DIRECTIONS

    @property
    def victims(self) -> frozenset[str]:
        """gRPC's client (1.85.1) aborts its process on a GOAWAY with an error code that no standard
        names, which a flipped bit can make: a node may end by what comes from the coordinator, and
        is started again."""
        node, _, listener = self.link.partition(" -> ")
        risky = (
            self.conditions.bit_flip_probability > 0
            and Direction.DOWNSTREAM in self.directions
            and listener == COORDINATOR
        )
        return frozenset({node}) if risky else frozenset()

    async def inject(self, cluster: ProxiedCluster) -> None:
        cluster.proxies[self.link].set_conditions(self.directions, self.conditions)

    async def remove(self, cluster: ProxiedCluster) -> None:
        await cluster.proxies[self.link].heal()


@dataclass(frozen=True)
class ResetLink(Fault):
    """Every connection of a link ends with RST; with `refuses_new`, new ones are refused."""

    link: str
    refuses_new: bool

    async def inject(self, cluster: ProxiedCluster) -> None:
        if self.refuses_new:
            await cluster.proxies[self.link].refuse_connections()
        else:
            cluster.proxies[self.link].reset_connections()

    async def remove(self, cluster: ProxiedCluster) -> None:
        await cluster.proxies[self.link].heal()


@dataclass(frozen=True)
class StrandLink(Fault):
    """Open connections of a link never forward anything again."""

    link: str

    async def inject(self, cluster: ProxiedCluster) -> None:
        cluster.proxies[self.link].strand_connections()


@dataclass(frozen=True)
class HalfCloseLink(Fault):
    link: str
    direction: Direction

    async def inject(self, cluster: ProxiedCluster) -> None:
        cluster.proxies[self.link].half_close(self.direction)


async def _arm(cluster: ProxiedCluster, process: str, spec: str) -> None:
    """Arm through the coordinator; a process that is down has no failpoints to arm."""
    with contextlib.suppress(grpc.RpcError, AssertionError, TimeoutError):
        async with asyncio.timeout(_ARMING_TIMEOUT_SECONDS):
            await cluster.arm_failpoints(process, spec)
