"""A node dies while it serves requests: they are resumed on other nodes, and clients see only
the reference's tokens."""

import asyncio

import pytest

from tests.faults.observed_cluster import ObservedCluster, make_call
from tests.history import ClientApi, Closed, Failed
from tests.paced_reference import paced_reference_tokens

pytestmark = pytest.mark.asyncio(loop_scope="session")

OUTPUT_TOKENS = 60


async def find_decode_node(observed: ObservedCluster) -> str:
    """Return the decode node that holds the only running request."""
    return (await observed.wait_blocks("in_use")).node


@pytest.mark.parametrize(
    ("tokens", "door"),
    [
        (1, ClientApi.SSE),
        (2, ClientApi.GRPC_STREAM),
        (17, ClientApi.SSE),
        pytest.param(1, ClientApi.GRPC_STREAM, marks=pytest.mark.thorough),
        pytest.param(2, ClientApi.SSE, marks=pytest.mark.thorough),
        pytest.param(17, ClientApi.GRPC_STREAM, marks=pytest.mark.thorough),
    ],
    ids=str,
)
async def test_stream_survives_decode_node_loss(
    observed: ObservedCluster, tokens: int, door: ClientApi
) -> None:
    await observed.cluster.arm_failpoints(
        "decode", f"decode.step.before=delay(0.2)+{tokens}"
    )  # it is not done when its node dies
    asked = observed.start_call(make_call(door, 50, OUTPUT_TOKENS, salt=tokens))
    await observed.wait_tokens(asked, tokens)
    victim = await find_decode_node(observed)
    observed.cluster.kill(victim)
    await observed.cluster.arm_failpoints("decode", "")
    operation = await asked.wait_end()
    assert operation.end == Closed(is_orderly=True)
    assert list(operation.tokens) == paced_reference_tokens(operation.call.prompt, OUTPUT_TOKENS)


async def test_many_streams_survive_decode_node_loss(observed: ObservedCluster) -> None:
    crowd = [
        observed.start_call(make_call(door, 64, OUTPUT_TOKENS, salt=salt))
        for salt in range(4)
        for door in ClientApi
    ]
    await observed.wait_until(
        "tokens at somebody", lambda: any(len(asked.operation.tokens) > 3 for asked in crowd)
    )
    observed.cluster.kill("decode-1")
    ends = [(await asked.wait_end()).end for asked in crowd]
    assert ends == [Closed(is_orderly=True)] * len(crowd)


async def test_prompts_of_a_lost_prefill_node_are_placed_again(observed: ObservedCluster) -> None:
    await observed.cluster.arm_failpoints("prefill", "prefill.layer.before=delay(0.2)+2")
    crowd = [
        observed.start_call(make_call(door, 300, 5, salt=salt))
        for salt, door in enumerate(ClientApi)
    ]
    await observed.wait_blocks("reserved", "writing")
    replaced = await observed.read_counter("baton_replaced_total")
    observed.cluster.kill("prefill-0")
    observed.cluster.start_missing()
    ends = [(await asked.wait_end()).end for asked in crowd]
    assert ends == [Closed(is_orderly=True)] * len(crowd)
    assert await observed.read_counter("baton_replaced_total") > replaced


@pytest.mark.thorough
async def test_stream_survives_the_loss_of_every_node_in_turn(observed: ObservedCluster) -> None:
    asked = observed.start_call(make_call(ClientApi.SSE, 33, 400, salt=9))
    for tokens, name in ((5, "decode-0"), (50, "prefill-0"), (90, "decode-1")):
        await observed.wait_tokens(asked, tokens)
        observed.cluster.kill(name)
        observed.cluster.start_missing()
        await observed.cluster.wait_all_joined()
    operation = await asked.wait_end()
    assert operation.end == Closed(is_orderly=True)
    assert list(operation.tokens) == paced_reference_tokens(operation.call.prompt, 400)


async def test_stopping_coordinator_answers_every_request(observed: ObservedCluster) -> None:
    """Requests that end in time are finished; others get an error, streams and requests without
    a token alike."""
    await observed.cluster.arm_failpoints(
        "decode", "decode.step.before=delay(0.02)"
    )  # long is long
    short, long = (
        [observed.start_call(make_call(door, 100, tokens, salt=tokens)) for door in ClientApi]
        for tokens in (30, 800)
    )
    await observed.wait_until(
        "somebody is answered", lambda: any(asked.task.done() for asked in short)
    )
    await observed.cluster.arm_failpoints(
        "prefill", "prefill.layer.before=delay(0.2)"
    )  # so that late ones wait
    late = [observed.start_call(make_call(door, 300, 5)) for door in ClientApi]
    await observed.wait_admitted(len(long) + len(late))
    observed.cluster.terminate("coordinator")
    ends = [(await asked.wait_end()).end for asked in [*short, *long, *late]]
    assert await observed.cluster.wait_for_exit("coordinator") == 0
    assert all(isinstance(end, Failed) or end == Closed(is_orderly=True) for end in ends), ends
    assert {end.code for end in ends if isinstance(end, Failed)} == {"UNAVAILABLE"}
    assert Closed(is_orderly=True) in ends


async def test_nodes_drop_the_work_of_a_killed_coordinator(observed: ObservedCluster) -> None:
    """Streams end, blocks are released, and the nodes join the next coordinator."""
    nodes = {
        name: pid for name, pid in observed.cluster.get_pids().items() if name != "coordinator"
    }
    await observed.cluster.arm_failpoints(
        "decode", "decode.step.before=delay(0.02)"
    )  # nobody is done before it dies
    crowd = [
        observed.start_call(make_call(door, 100, 400, salt=salt))
        for salt in range(2)
        for door in ClientApi
    ]
    await observed.wait_blocks("in_use")
    observed.cluster.kill("coordinator")
    observed.was_coordinator_killed = True
    await asyncio.gather(*(asked.wait_end() for asked in crowd))
    await observed.recover_and_check()
    assert {
        name: pid for name, pid in observed.cluster.get_pids().items() if name != "coordinator"
    } == nodes
