from baton.cli.checks.ledger import (
    BlockHolding,
    find_idle_nodes,
    find_ledger_faults,
    find_ownerless_blocks,
)
from baton.pb.cluster_pb2 import NodeStatus, StatusResponse
from baton.pb.common_pb2 import Ledger, LedgerOwner


def ledger(*owners: tuple[str, str, int, float], total: int = 20, **counts: int) -> Ledger:
    rows = [
        LedgerOwner(owner=owner, state=state, blocks=blocks, age_seconds=age)
        for owner, state, blocks, age in owners
    ]
    return Ledger(node="decode-0", incarnation="i", total=total, owners=rows, **counts)


def test_every_state_counts() -> None:
    owners = [
        (f"o{n}", state, n, 1.0)
        for n, state in enumerate(("reserved", "writing", "in_use", "quarantined"), 1)
    ]
    assert (
        find_ledger_faults(
            [ledger(*owners, free=4, cached=6, reserved=1, writing=2, in_use=3, quarantined=4)], []
        )
        == []
    )


def test_a_block_too_many_or_too_few_is_found() -> None:
    assert len(find_ledger_faults([ledger(free=19)], [])) == 1
    assert len(find_ledger_faults([ledger(free=21)], [])) == 1


def test_a_shared_block_may_have_two_owners_but_not_none() -> None:
    sharing = [("a/1.0", "in_use", 3, 1.0), ("b/1.0", "in_use", 3, 1.0)]
    assert find_ledger_faults([ledger(*sharing, free=16, in_use=4)], []) == []
    assert find_ledger_faults([ledger(*sharing, free=13, in_use=7)], []) == [
        "decode-0: 7 blocks in_use, owners account for 6"
    ]


def test_only_idle_nodes_and_old_holdings_are_suspected() -> None:
    held = [
        ("old/1.0", "in_use", 1, 9.0),
        ("new/1.0", "in_use", 1, 0.1),
        ("lost", "quarantined", 1, 9.0),
    ]
    unbalanced = ledger(*held, free=17, in_use=2, quarantined=1)
    assert find_ownerless_blocks([unbalanced], {("decode-0", "i")}, 0.5) == {
        BlockHolding("decode-0", "i", "old/1.0", "in_use")
    }
    assert find_ownerless_blocks([unbalanced], {("decode-0", "another")}, 0.5) == set()


def test_idle_is_what_every_look_found_idle() -> None:
    def look(**placed: int) -> StatusResponse:
        return StatusResponse(
            nodes=[NodeStatus(name=name, incarnation="i", placed=n) for name, n in placed.items()]
        )

    assert find_idle_nodes(look(a=0, b=0, c=1), look(a=0, b=1, c=0)) == {("a", "i")}
