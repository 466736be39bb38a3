"""A node dies under requests: they go on elsewhere, and clients see the reference's tokens and nothing else."""

import asyncio

import pytest

from node_engine.paced import paced_reference
from tests.faults.scene import Scene, call
from tests.history import Closed, Door, Failed

pytestmark = pytest.mark.asyncio(loop_scope="session")

OUTPUT = 60


async def decode_of(scene: Scene) -> str:
    """The decode node that holds the only running request."""
    return (await scene.until_blocks("in_use")).node


@pytest.mark.parametrize(
    ("tokens", "door"),
    [
        (1, Door.SSE),
        (2, Door.GRPC_STREAM),
        (17, Door.SSE),
        pytest.param(1, Door.GRPC_STREAM, marks=pytest.mark.thorough),
        pytest.param(2, Door.SSE, marks=pytest.mark.thorough),
        pytest.param(17, Door.GRPC_STREAM, marks=pytest.mark.thorough),
    ],
    ids=str,
)
async def test_decode_dies_mid_stream(scene: Scene, tokens: int, door: Door) -> None:
    await scene.cluster.arm("decode", f"decode.step.before=delay(0.2)+{tokens}")  # it is not done when its node dies
    asked = scene.ask(call(door, 50, OUTPUT, salt=tokens))
    await scene.until_tokens(asked, tokens)
    victim = await decode_of(scene)
    scene.cluster.kill(victim)
    await scene.cluster.arm("decode", "")
    operation = await asked.over()
    assert operation.end == Closed(in_order=True)
    assert list(operation.tokens) == paced_reference(operation.call.prompt, OUTPUT)


async def test_decode_dies_under_many_streams(scene: Scene) -> None:
    crowd = [scene.ask(call(door, 64, OUTPUT, salt=salt)) for salt in range(4) for door in Door]
    await scene.until("tokens at somebody", lambda: any(len(asked.operation.tokens) > 3 for asked in crowd))
    scene.cluster.kill("decode-1")
    ends = [(await asked.over()).end for asked in crowd]
    assert ends == [Closed(in_order=True)] * len(crowd)


async def test_prefill_dies_and_its_prompts_are_placed_again(scene: Scene) -> None:
    await scene.cluster.arm("prefill", "prefill.layer.before=delay(0.2)+2")
    crowd = [scene.ask(call(door, 300, 5, salt=salt)) for salt, door in enumerate(Door)]
    await scene.until_blocks("reserved", "writing")
    replaced = await scene.counter("baton_replaced_total")
    scene.cluster.kill("prefill-0")
    scene.cluster.revive()
    ends = [(await asked.over()).end for asked in crowd]
    assert ends == [Closed(in_order=True)] * len(crowd)
    assert await scene.counter("baton_replaced_total") > replaced


@pytest.mark.thorough
async def test_every_node_dies_one_after_the_other_under_one_stream(scene: Scene) -> None:
    asked = scene.ask(call(Door.SSE, 33, 400, salt=9))
    for tokens, name in ((5, "decode-0"), (50, "prefill-0"), (90, "decode-1")):
        await scene.until_tokens(asked, tokens)
        scene.cluster.kill(name)
        scene.cluster.revive()
        await scene.cluster.whole()
    operation = await asked.over()
    assert operation.end == Closed(in_order=True)
    assert list(operation.tokens) == paced_reference(operation.call.prompt, 400)


async def test_a_coordinator_that_stops_in_order_answers_everybody(scene: Scene) -> None:
    """What ends in time is finished, the rest is told so: streams, and requests that wait for a first token."""
    await scene.cluster.arm("decode", "decode.step.before=delay(0.02)")  # long is long
    short, long = ([scene.ask(call(door, 100, tokens, salt=tokens)) for door in Door] for tokens in (30, 800))
    await scene.until("somebody is answered", lambda: any(asked.task.done() for asked in short))
    await scene.cluster.arm("prefill", "prefill.layer.before=delay(0.2)")  # so that late ones wait
    late = [scene.ask(call(door, 300, 5)) for door in Door]
    await scene.until_taken_in(len(long) + len(late))
    scene.cluster.terminate("coordinator")
    ends = [(await asked.over()).end for asked in [*short, *long, *late]]
    assert await scene.cluster.ended("coordinator") == 0
    assert all(isinstance(end, Failed) or end == Closed(in_order=True) for end in ends), ends
    assert {end.code for end in ends if isinstance(end, Failed)} == {"UNAVAILABLE"}
    assert Closed(in_order=True) in ends


async def test_the_coordinator_dies_and_the_nodes_drop_its_work(scene: Scene) -> None:
    """Streams are cut; blocks come back without anybody's help; the nodes live on and join the next coordinator."""
    nodes = {name: pid for name, pid in scene.cluster.pids().items() if name != "coordinator"}
    await scene.cluster.arm("decode", "decode.step.before=delay(0.02)")  # nobody is done before it dies
    crowd = [scene.ask(call(door, 100, 400, salt=salt)) for salt in range(2) for door in Door]
    await scene.until_blocks("in_use")
    scene.cluster.kill("coordinator")
    scene.coordinator_died = True
    await asyncio.gather(*(asked.over() for asked in crowd))
    await scene.settle()
    assert {name: pid for name, pid in scene.cluster.pids().items() if name != "coordinator"} == nodes
