"""What a pool knows of the others: how long fetching takes, and whom it leaves alone."""

from dataclasses import replace

from baton.types import Incarnation, NodeName, PeerAddress
from kv_pool.core.peers.fetch_estimator import (
    MAX_BACKOFF_SECONDS,
    MAX_PEERS,
    MIN_BACKOFF_SECONDS,
    PeerFetchEstimator,
)

MIB = 1 << 20


def make_peer(name: str) -> PeerAddress:
    return PeerAddress(NodeName(name), Incarnation(f"life of {name}"), "host", "host:1")


A, B = make_peer("a"), make_peer("b")


def test_fetch_time_is_predicted_from_measurements() -> None:
    book = PeerFetchEstimator()
    before = book.predict_fetch_seconds(A, MIB)
    for size in (MIB, 4 * MIB, 16 * MIB) * 8:
        book.record_fetch(A, size, 0.05 + size / MIB * 0.02)
        book.record_fetch(B, size, 0.001 + size / MIB * 0.0005)
    assert before < 0.01
    assert abs(book.predict_fetch_seconds(A, 8 * MIB) - 0.21) < 0.02
    assert book.predict_fetch_seconds(B, 8 * MIB) < 0.01
    assert (
        book.predict_fetch_seconds(B, 8 * MIB)
        < book.predict_fetch_seconds(make_peer("new"), 8 * MIB)
        < book.predict_fetch_seconds(A, 8 * MIB)
    )


def test_failed_peer_backs_off_exponentially() -> None:
    book = PeerFetchEstimator()
    assert not book.is_backing_off(A, 0.0)
    rests = []
    for _ in range(8):
        book.record_failure(A, 100.0)
        rests.append(
            next(second for second in range(100) if not book.is_backing_off(A, 100.0 + second))
        )
    assert rests[:3] == [MIN_BACKOFF_SECONDS, 2 * MIN_BACKOFF_SECONDS, 4 * MIN_BACKOFF_SECONDS]
    assert rests[-1] == MAX_BACKOFF_SECONDS
    assert not book.is_backing_off(B, 100.0)
    assert not book.is_backing_off(replace(A, incarnation=Incarnation("its next life")), 100.0)
    book.record_fetch(A, MIB, 0.1)
    book.record_failure(A, 200.0)
    assert not book.is_backing_off(A, 200.0 + MIN_BACKOFF_SECONDS)


def test_number_of_peers_is_bounded() -> None:
    book = PeerFetchEstimator()
    for number in range(MAX_PEERS + 1):
        book.record_failure(make_peer(str(number)), 0.0)
        book.record_fetch(make_peer(f"quick {number}"), MIB, 0.1)
    assert not book.is_backing_off(make_peer("0"), 0.0)
    assert book.is_backing_off(make_peer(str(MAX_PEERS)), 0.0)
