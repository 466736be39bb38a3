"""More requests than the caches hold: cancelled waves, requests that compete, and requests that
never fit."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.faults.observed_cluster import ObservedCluster, make_call
from tests.history import ClientApi, Closed, Failed

IN_MODULE = pytest.mark.asyncio(loop_scope="module")

CACHE_TOKENS = 8192  # tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def observed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ObservedCluster]:
    """One node of each kind, whose cache holds one long prompt and little more."""
    settings = {
        "prefill": 1,
        "decode": 1,
        "max_model_len": 2 * CACHE_TOKENS,
        "max_batched_tokens": 1024,
        "max_num_seqs": 64,
        "paced_prefill_us_per_token": 20.0,
        "request_timeout": 60.0,
    }
    async with ObservedCluster.build(tmp_path_factory.mktemp("full"), **settings) as made:
        yield made
    made.cluster.assert_clean()


@IN_MODULE
async def test_waves_of_cancelled_requests_leave_nothing_held(observed: ObservedCluster) -> None:
    for wave in range(3):
        crowd = [
            observed.start_call(
                make_call(
                    list(ClientApi)[number % 4], 300, 200, salt=1000 * wave + number, timeout=60.0
                )
            )
            for number in range(100)
        ]
        await observed.wait_blocks("in_use")
        await asyncio.sleep(0.1 * wave)  # at other moments of a wave's life
        await asyncio.gather(*(asked.cancel_call() for asked in crowd))
    await observed.complete_call(make_call(ClientApi.SSE, 100, 3))
    await observed.recover_and_check()


@IN_MODULE
async def test_requests_that_exceed_the_cache_together_are_all_answered(
    observed: ObservedCluster,
) -> None:
    """Any two prompts fit, but no two prompts with their outputs: one request is preempted and
    resumed later."""
    length, output = CACHE_TOKENS // 2 - 100, 200
    replaced = await observed.read_counter("baton_replaced_total")

    async def two_are_in() -> bool:
        ledgers = (await observed.cluster.get_ledgers()).ledgers
        return any(
            ledger.node.startswith("decode") and ledger.in_use >= 2 * (length // 16)
            for ledger in ledgers
        )

    await observed.cluster.arm_failpoints(
        "decode", "decode.step.before=delay(0.2)"
    )  # the first is not done when the second comes
    crowd = [
        observed.start_call(make_call(ClientApi.SSE, length, output, salt=number, timeout=60.0))
        for number in range(3)
    ]
    await observed.wait_until("two in the cache", two_are_in)
    await observed.cluster.arm_failpoints("decode", "")
    ends = [(await asked.wait_end()).end for asked in crowd]
    assert ends == [Closed(is_orderly=True)] * len(crowd)
    assert await observed.read_counter("baton_replaced_total") > replaced
    await observed.recover_and_check()


@IN_MODULE
async def test_small_requests_pass_a_waiting_large_one_without_starving_it(
    observed: ObservedCluster,
) -> None:
    big = [
        observed.start_call(make_call(ClientApi.GRPC_ONCE, 5000, 8, salt=number, timeout=60.0))
        for number in range(3)
    ]
    small = [
        observed.start_call(make_call(ClientApi.GRPC_ONCE, 64, 8, salt=number, timeout=60.0))
        for number in range(40)
    ]
    for asked in [*small, *big]:
        assert (await asked.wait_end()).end == Closed(is_orderly=True)
    await observed.recover_and_check()


@IN_MODULE
@pytest.mark.parametrize("door", list(ClientApi), ids=lambda door: door.value)
async def test_request_larger_than_the_cache_is_refused_and_holds_nothing(
    observed: ObservedCluster, door: ClientApi
) -> None:
    refused = [
        await observed.start_call(make_call(door, CACHE_TOKENS + 1, 1)).wait_end(),
        await observed.start_call(make_call(door, CACHE_TOKENS - 10, 11)).wait_end(),
    ]
    for operation in refused:
        assert isinstance(operation.end, Failed)
        assert operation.end.code == "INVALID_ARGUMENT"
        assert str(CACHE_TOKENS) in operation.end.message
    observed.exclude_operations(refused)
    await observed.complete_call(make_call(door, CACHE_TOKENS - 10, 10))
    await observed.recover_and_check()
