"""Invariant I1 of tests/history_checks.py: ledgers balance, and hold only cache without traffic."""

from collections import Counter
from collections.abc import Iterable

from baton.pb.common_pb2 import Ledger

_STATES = ("free", "cached", "reserved", "writing", "in_use", "quarantined")
_HELD = ("reserved", "writing", "in_use", "quarantined")


def find_unbalanced_ledgers(ledgers: Iterable[Ledger]) -> list[str]:
    """Ledgers whose states do not add up, whatever the traffic is; one line each."""
    found = []
    for ledger in ledgers:
        counts = {state: int(getattr(ledger, state)) for state in _STATES}
        if sum(counts.values()) != ledger.total:
            found.append(
                f"I1: {ledger.node}: {counts} is {sum(counts.values())}, not {ledger.total}"
            )
        owned: Counter[str] = Counter()
        for owner in ledger.owners:
            owned[owner.state] += owner.blocks
        found += [
            f"I1: {ledger.node}: {counts[state]} blocks {state}, its owners have {owned[state]}"
            for state in _HELD
            if owned[state] < counts[state]
        ]
    return found


def find_held_blocks(ledgers: Iterable[Ledger]) -> list[str]:
    """Blocks that are neither free nor cached; there are none once traffic has stopped."""
    return [
        f"I1: {ledger.node}: {owner.blocks} blocks {owner.state} by {owner.owner} "
        f"for {owner.age_seconds:.1f} s"
        for ledger in ledgers
        for owner in ledger.owners
        if owner.state in _HELD
    ] + [
        f"I1: {ledger.node}: {getattr(ledger, state)} blocks {state}"
        for ledger in ledgers
        for state in _HELD
        if getattr(ledger, state) and not any(owner.state == state for owner in ledger.owners)
    ]
