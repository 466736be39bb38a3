import threading
from typing import Any

from baton.process.log_rate_limit import DEFAULT_BURST, RateLimitedLogger


def test_flood_is_limited_and_suppressed_lines_are_counted() -> None:
    now = 0.0
    logged: list[tuple[str, dict[str, Any]]] = []
    log = RateLimitedLogger(lambda: now)

    def say(event: str, **fields: Any) -> None:
        logged.append((event, fields))

    for _ in range(1000):
        log.log_event(say, "refused", rate_limit_key="invalid_request", code="invalid_request")
    assert logged == [("refused", {"code": "invalid_request"})] * DEFAULT_BURST
    log.log_event(
        say, "refused", rate_limit_key="queue_full", code="queue_full"
    )  # another kind has an allowance of its own
    assert len(logged) == DEFAULT_BURST + 1
    now = 1.5
    for _ in range(3):
        log.log_event(say, "refused", rate_limit_key="invalid_request", code="invalid_request")
    assert logged[DEFAULT_BURST + 1 :] == [
        ("refused", {"code": "invalid_request", "left_out": 1000 - DEFAULT_BURST})
    ]


def test_kinds_are_bounded_too() -> None:
    logged: list[str] = []
    log = RateLimitedLogger(lambda: 0.0)
    for number in range(100_000):
        log.log_event(logged.append, f"made up {number}")
    assert len(logged) < 1000
    assert len(log._kinds) < 1000


def test_concurrent_threads_share_the_limit() -> None:
    """A bucket read by two at once admits twice what it holds, and loses what it has counted."""
    inside, overlaps = threading.Lock(), []
    met = threading.Event()

    def now() -> float:
        if not inside.acquire(blocking=False):
            overlaps.append(1)
            met.set()
            return 0.0
        met.wait(0.2)  # for another thread to come in, which none does
        inside.release()
        return 0.0

    log = RateLimitedLogger(now, burst=1)
    logged: list[str] = []
    threads = [
        threading.Thread(target=log.log_event, args=(logged.append, "refused")) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (logged, overlaps) == (["refused"], [])
