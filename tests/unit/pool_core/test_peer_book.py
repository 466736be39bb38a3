"""What a pool knows of the others: how long fetching takes, and whom it leaves alone."""

from dataclasses import replace

from baton.types import Incarnation, NodeName, PeerAddress
from kv_pool.core.peer_book import LONGEST_REST, MOST, REST, PeerBook

MIB = 1 << 20


def peer(name: str) -> PeerAddress:
    return PeerAddress(NodeName(name), Incarnation(f"life of {name}"), "host", "host:1")


A, B = peer("a"), peer("b")


def test_fetching_is_predicted_from_what_it_took() -> None:
    book = PeerBook()
    before = book.seconds(A, MIB)
    for size in (MIB, 4 * MIB, 16 * MIB) * 8:
        book.took(A, size, 0.05 + size / MIB * 0.02)
        book.took(B, size, 0.001 + size / MIB * 0.0005)
    assert before < 0.01
    assert abs(book.seconds(A, 8 * MIB) - 0.21) < 0.02
    assert book.seconds(B, 8 * MIB) < 0.01
    assert book.seconds(B, 8 * MIB) < book.seconds(peer("new"), 8 * MIB) < book.seconds(A, 8 * MIB)


def test_one_that_failed_rests_longer_and_longer_until_it_answers() -> None:
    book = PeerBook()
    assert not book.rests(A, 0.0)
    rests = []
    for _ in range(8):
        book.failed(A, 100.0)
        rests.append(next(second for second in range(100) if not book.rests(A, 100.0 + second)))
    assert rests[:3] == [REST, 2 * REST, 4 * REST]
    assert rests[-1] == LONGEST_REST
    assert not book.rests(B, 100.0)
    assert not book.rests(replace(A, incarnation=Incarnation("its next life")), 100.0)
    book.took(A, MIB, 0.1)
    book.failed(A, 200.0)
    assert not book.rests(A, 200.0 + REST)


def test_it_remembers_so_many_and_no_more() -> None:
    book = PeerBook()
    for number in range(MOST + 1):
        book.failed(peer(str(number)), 0.0)
        book.took(peer(f"quick {number}"), MIB, 0.1)
    assert not book.rests(peer("0"), 0.0)
    assert book.rests(peer(str(MOST)), 0.0)
