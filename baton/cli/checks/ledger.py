"""Checks of block ledgers for `baton audit`. Pure: ledgers in, lines about faults out."""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from baton.pb.cluster_pb2 import StatusResponse
from baton.pb.common_pb2 import Ledger

BLOCK_STATES = ("free", "cached", "reserved", "writing", "in_use", "quarantined")
# States in which every block must have an owner.
OWNED_STATES = ("reserved", "writing", "in_use", "quarantined")
# Owner labels of blocks that are being copied into the pool begin so; they belong to no request.
PUBLICATION_PREFIX = "publication "
# States whose owner must be a request that the coordinator knows.
LIVE_OWNER_STATES = ("reserved", "writing", "in_use")
POOL_ROLE = "pool"


class BlockHolding(NamedTuple):
    """Blocks that one owner holds on one node."""

    node: str
    incarnation: str
    owner: str
    state: str


def find_ledger_faults(ledgers: Iterable[Ledger], silent: Iterable[str]) -> list[str]:
    """Return one line per fault in the ledgers.

    A fault is a ledger that does not balance, a state whose owners account for fewer blocks than it
    has, or a node that did not answer.
    """
    found = [f"{node}: did not answer" for node in silent]
    for ledger in ledgers:
        counts = {state: int(getattr(ledger, state)) for state in BLOCK_STATES}
        if sum(counts.values()) != ledger.total:
            summary = " + ".join(f"{count} {state}" for state, count in counts.items())
            found.append(
                f"{ledger.node}: does not balance: {summary} is {sum(counts.values())}, "
                f"not {ledger.total}"
            )
        owned: Counter[str] = Counter()
        for owner in ledger.owners:
            owned[owner.state] += owner.blocks
        # A shared block is in use for several owners at once, so owners may claim more blocks than
        # there are.
        found += [
            f"{ledger.node}: {counts[state]} blocks {state}, owners account for {owned[state]}"
            for state in OWNED_STATES
            if owned[state] < counts[state]
        ]
    return found


def find_ownerless_blocks(
    ledgers: Iterable[Ledger], idle: Collection[tuple[str, str]], older_than: float
) -> set[BlockHolding]:
    """Return holdings older than `older_than` seconds on idle nodes, where no attempt is placed.

    `idle` has (name, incarnation) of nodes. `older_than` is at least the time that the look-up
    took, so that a request that began and ended meanwhile is not reported.
    """
    return {
        BlockHolding(ledger.node, ledger.incarnation, owner.owner, owner.state)
        for ledger in ledgers
        if (ledger.node, ledger.incarnation) in idle
        for owner in ledger.owners
        if owner.state in LIVE_OWNER_STATES
        and owner.age_seconds > older_than
        and not owner.owner.startswith(PUBLICATION_PREFIX)
    }


def find_idle_nodes(*statuses: StatusResponse) -> set[tuple[str, str]]:
    """Return (name, incarnation) of the nodes on which no status shows a placed attempt."""
    return set.intersection(
        *(
            {
                (node.name, node.incarnation)
                for node in status.nodes
                if node.role != POOL_ROLE and not node.placed
            }
            for status in statuses
        )
    )


def find_unowned_pins(ledgers: Iterable[Ledger], *statuses: StatusResponse) -> set[BlockHolding]:
    """Return what nodes hold of their pools although no status shows a request in the cluster."""
    if any(status.running or status.queued for status in statuses):
        return set()
    pools = {
        (node.name, node.incarnation)
        for status in statuses
        for node in status.nodes
        if node.role == POOL_ROLE
    }
    return {
        BlockHolding(ledger.node, ledger.incarnation, owner.owner, owner.state)
        for ledger in ledgers
        if (ledger.node, ledger.incarnation) in pools
        for owner in ledger.owners
        if owner.state in OWNED_STATES
    }
