"""The window of recent latencies."""

from coordinator.core.recent import MOST, WINDOW, Recent


def test_percentiles_of_a_window() -> None:
    recent = Recent()
    assert (recent.latency(0.0).requests, recent.latency(0.0).ttft_p90) == (0, 0.0)
    for number in range(10):
        recent.add(float(number), number / 10, None if number % 2 else 0.01)
    found = recent.latency(9.0)
    assert (found.requests, found.ttft_p50, found.ttft_p90, found.tpot_p50) == (10, 0.5, 0.9, 0.01)
    assert recent.latency(WINDOW + 4.0).requests == 5
    assert recent.latency(2 * WINDOW).requests == 0


def test_it_is_bounded_in_count() -> None:
    recent = Recent()
    for _ in range(MOST + 5):
        recent.add(1.0, 1.0, 1.0)
    assert recent.latency(1.0).requests == MOST
