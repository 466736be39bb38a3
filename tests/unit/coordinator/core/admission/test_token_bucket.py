"""A token bucket admits at its rate, plus one burst."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.admission.tenants import (
    TokenBucket,
)


@given(
    asks=st.lists(st.tuples(st.floats(0, 2), st.floats(0.1, 30)), max_size=60),
    rate=st.floats(0.5, 20),
    burst=st.floats(1, 50),
)
def test_token_bucket_admits_rate_plus_one_burst(
    asks: list[tuple[float, float]], rate: float, burst: float
) -> None:
    bucket, now, paid = TokenBucket.make_full(rate, burst, 0.0), 0.0, 0.0
    for passed, amount in asks:
        now += passed
        if bucket.wait_seconds(now) == 0.0:
            assert paid < burst + rate * now + 1e-6, "nothing is let in on credit"
            bucket.charge_tokens(amount, now)
            paid += amount
        else:
            now += bucket.wait_seconds(now) + 1e-6
            assert bucket.wait_seconds(now) == 0.0
