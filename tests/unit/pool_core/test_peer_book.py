"""What a pool knows of the others: how long fetching takes, and whom it leaves alone."""

from kv_pool.core.peer_book import LONGEST_REST, MOST, REST, PeerBook

MIB = 1 << 20


def test_fetching_is_predicted_from_what_it_took() -> None:
    book = PeerBook()
    before = book.seconds("far", MIB)
    for size in (MIB, 4 * MIB, 16 * MIB) * 8:
        book.took("far", size, 0.05 + size / MIB * 0.02)
        book.took("near", size, 0.001 + size / MIB * 0.0005)
    assert before < 0.01
    assert abs(book.seconds("far", 8 * MIB) - 0.21) < 0.02
    assert book.seconds("near", 8 * MIB) < 0.01
    assert book.seconds("near", 8 * MIB) < book.seconds("new", 8 * MIB) < book.seconds("far", 8 * MIB)


def test_one_that_failed_rests_longer_and_longer_until_it_answers() -> None:
    book = PeerBook()
    assert not book.rests("a", 0.0)
    rests = []
    for _ in range(8):
        book.failed("a", 100.0)
        rests.append(next(second for second in range(100) if not book.rests("a", 100.0 + second)))
    assert rests[:3] == [REST, 2 * REST, 4 * REST]
    assert rests[-1] == LONGEST_REST
    assert not book.rests("b", 100.0)
    book.took("a", MIB, 0.1)
    book.failed("a", 200.0)
    assert not book.rests("a", 200.0 + REST)


def test_it_remembers_so_many_and_no_more() -> None:
    book = PeerBook()
    book.failed("first", 0.0)
    for number in range(MOST):
        book.failed(f"pool-{number}", 0.0)
    assert not book.rests("first", 0.0)
    assert book.rests(f"pool-{MOST - 1}", 0.0)
