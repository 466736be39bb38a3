"""What `baton audit` calls wrong with a block ledger. Pure: ledgers in, findings out."""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from baton.pb.cluster_pb2 import StatusResponse
from baton.pb.common_pb2 import Ledger

BLOCK_STATES = ("free", "cached", "reserved", "writing", "in_use", "quarantined")
OWNED_STATES = (
    "reserved",
    "writing",
    "in_use",
    "quarantined",
)  # states that somebody must answer for
# how the label of blocks begins that are being copied into the pool, for no request
PUBLICATION_PREFIX = "publication "
LIVE_OWNER_STATES = (
    "reserved",
    "writing",
    "in_use",
)  # states whose owner must be a request that the coordinator knows
POOL_ROLE = "pool"  # the role of one


class BlockHolding(NamedTuple):
    """Blocks that one owner holds on one node."""

    node: str
    incarnation: str
    owner: str
    state: str


def find_ledger_faults(ledgers: Iterable[Ledger], silent: Iterable[str]) -> list[str]:
    """One line per ledger that does not balance, state that its owners do not account for, and
    silent node."""
    found = [f"{node}: did not answer" for node in silent]
    for ledger in ledgers:
        counts = {state: int(getattr(ledger, state)) for state in BLOCK_STATES}
        if sum(counts.values()) != ledger.total:
            shown = " + ".join(f"{count} {state}" for state, count in counts.items())
            found.append(
                f"{ledger.node}: does not balance: {shown} is {sum(counts.values())}, not {ledger.total}"
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
    """Holdings on `idle` nodes (name, incarnation), where the coordinator knows of no attempt, that
    are older than `older_than` seconds: older than the look-up itself, so that no request that came
    and went meanwhile is blamed."""
    return {
        BlockHolding(ledger.node, ledger.incarnation, owner.owner, owner.state)
        for ledger in ledgers
        if (ledger.node, ledger.incarnation) in idle
        for owner in ledger.owners
        if owner.state in LIVE_OWNER_STATES
        and owner.age_seconds > older_than
        and not owner.owner.startswith(PUBLICATION_PREFIX)
    }


def find_idle_nodes(*looks: StatusResponse) -> set[tuple[str, str]]:
    """Nodes on which every look found no attempt placed."""
    nodes = [[node for node in look.nodes if node.role != POOL_ROLE] for look in looks]
    return set.intersection(
        *({(one.name, one.incarnation) for one in each if not one.placed} for each in nodes)
    )


def find_unowned_pins(ledgers: Iterable[Ledger], *looks: StatusResponse) -> set[BlockHolding]:
    """What nodes hold of their pools though every look found no request in the whole cluster."""
    if any(look.running or look.queued for look in looks):
        return set()
    pools = {
        (node.name, node.incarnation)
        for look in looks
        for node in look.nodes
        if node.role == POOL_ROLE
    }
    return {
        BlockHolding(ledger.node, ledger.incarnation, owner.owner, owner.state)
        for ledger in ledgers
        if (ledger.node, ledger.incarnation) in pools
        for owner in ledger.owners
        if owner.state in OWNED_STATES
    }
