"""KV transfers to one decode node keep failing: the breaker of the pair opens, requests are served,
and a probe closes the breaker once transfers work again."""

import itertools
from pathlib import Path

import pytest

from baton.pb import cluster_pb2 as pb
from tests.faults.observed_cluster import ObservedCluster, PendingCall, make_call
from tests.grpc_calls import call_cluster_service
from tests.history import ClientApi, Closed

UNSEEN_SALTS = itertools.count(5000)  # decode must not hold the prompt already
# A node that rejoined would have a closed breaker; a slow KV transfer would count as a failure.
LONG_TIMEOUTS = {"silence": 60.0, "stall": 60.0, "ticket_ttl": 30.0, "progress_timeout": 30.0}


async def count_breaker_changes(observed: ObservedCluster, state: str) -> float:
    return (await observed.cluster.get_status()).counters.get(
        f'baton_breaker_changes_total{{state="{state}"}}', 0.0
    )


def start_request(observed: ObservedCluster) -> PendingCall:
    return observed.start_call(make_call(ClientApi.GRPC_ONCE, 40, 3, salt=next(UNSEEN_SALTS)))


async def check_served(asked: PendingCall) -> None:
    assert (await asked.wait_end()).end == Closed(is_orderly=True)


@pytest.mark.asyncio(loop_scope="session")
async def test_failing_pair_is_avoided_until_it_recovers(tmp_path: Path) -> None:
    """While decode-1 is drained, every hand-off is between the two nodes that matter."""
    async with ObservedCluster.build(tmp_path, **LONG_TIMEOUTS) as observed:
        grpc = observed.cluster.grpc_address
        await observed.cluster.arm_failpoints("decode-0", "transfer.land.before=error")
        await call_cluster_service(grpc, "Drain", pb.DrainRequest(node="decode-1"))
        first = start_request(observed)

        async def is_open() -> bool:
            return await count_breaker_changes(observed, "open") > 0

        await observed.wait_until("the pair is kept apart", is_open)
        await call_cluster_service(grpc, "Undrain", pb.UndrainRequest(node="decode-1"))
        await check_served(first)
        for asked in [start_request(observed) for _ in range(4)]:
            await check_served(asked)
        assert await count_breaker_changes(observed, "closed") == 0, (
            "no hand-off between them has gone through"
        )

        await observed.cluster.arm_failpoints("decode-0", "")
        await call_cluster_service(grpc, "Drain", pb.DrainRequest(node="decode-1"))
        await check_served(start_request(observed))
        assert await count_breaker_changes(observed, "closed") == 1, "the request was the probe"
        await call_cluster_service(grpc, "Undrain", pb.UndrainRequest(node="decode-1"))
        await observed.recover_and_check()
    observed.cluster.assert_clean()
