"""A node of another model, or a second process of a name, joins while requests run: no client
gets a token of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.cli.supervisor.child_specs import COORDINATOR
from baton.pb import cluster_pb2
from tests.cluster import Cluster
from tests.grpc_calls import GenerateAnswer, collect_answer
from tests.models import build_model, find_stable_prompts
from tests.paced_reference import paced_reference_tokens

pytestmark = pytest.mark.asyncio
TIMEOUT_SECONDS = 60.0  # seconds
LONG_OUTPUT = 90  # tokens of output: a stream that is under way for long
SHORT_TIMEOUTS: dict[str, Any] = {
    "heartbeat": 0.2,
    "silence": 2.0,
    "prefill": 0,
    "decode": 1,
    "mode": "colocated",
}
PACED_SETTINGS: dict[str, Any] = {
    **SHORT_TIMEOUTS,
    "engine": "paced",
    "model": "",
    "paced_step_ms": 5.0,
}


async def wait_refused(cluster: Cluster, name: str) -> str:
    """Return the last log line of a process that must not join."""
    assert await cluster.wait_for_exit(name, TIMEOUT_SECONDS) == 2
    del cluster._processes[name]  # the end that was meant
    return cluster.log_tail(name).splitlines()[-1]


async def read_counter(cluster: Cluster, name: str) -> float:
    return (await cluster.get_status()).counters.get(name, 0.0)


@asynccontextmanager
async def running_stream(
    cluster: Cluster, prompt: list[int], tokens: int
) -> AsyncIterator["asyncio.Task[GenerateAnswer]"]:
    """A request that has received some of its tokens."""
    async with cluster.stream_generate(
        prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True
    ) as call:
        begun = asyncio.Event()

        async def responses() -> AsyncIterator[Any]:
            async for response in call:
                begun.set()
                yield response

        answer = asyncio.create_task(collect_answer(responses()))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await begun.wait()
        yield answer


def pids_by_node(status: cluster_pb2.StatusResponse) -> dict[str, int]:
    return {node.name: node.pid for node in status.nodes}


async def test_stream_is_not_resumed_on_other_weights(tmp_path: Path) -> None:
    """The only decode node is killed, and a node of the same name and shape with other weights asks
    to join.

    It has to wait, and the stream is resumed when the original node is back. The coordinator has
    no model of its own here."""
    right, wrong = (build_model("qwen2", tmp_path, seed=seed) for seed in (0, 1))
    (clear,) = find_stable_prompts(right, (40,), LONG_OUTPUT)
    per_node: dict[str, dict[str, object]] = {COORDINATOR: {"model": ""}, "decode-0": {}}
    settings = SHORT_TIMEOUTS | {"dtype": "float32", "threads": "1"}
    cluster = Cluster(tmp_path / "run", model=str(right), per_node=per_node, **settings)
    async with cluster:
        await cluster.arm_failpoints("decode", "decode.step.before=delay(0.05)")
        async with running_stream(cluster, list(clear.prompt), LONG_OUTPUT) as answer:
            cluster.kill("decode-0")
            await cluster.wait_status(lambda status: not status.nodes)
            cluster.per_node["decode-0"]["model"] = str(wrong)
            cluster.start("decode-0")
            await cluster.wait_status(
                lambda status: status.counters.get('baton_joins_total{outcome="refused"}', 0) >= 2
            )
            said = [
                line
                for line in cluster.log_tail("decode-0").splitlines()
                if "join refused for now, retrying" in line
            ][-1]
            assert "has model_digest" in said
            assert "1 requests of that model have not ended" in said
            assert not answer.done()
            cluster.kill("decode-0")  # it would wait until the stream has ended
            cluster.per_node["decode-0"].clear()
            cluster.start("decode-0")
            async with asyncio.timeout(TIMEOUT_SECONDS):
                whole = await answer
        assert whole.tokens == clear.reference_tokens
        assert len(whole.timeline.models) == 1
        await cluster.wait_idle()
    cluster.assert_clean()


async def test_node_of_another_model_is_refused(tmp_path: Path) -> None:
    """It is refused under the coordinator's model name even if no other node has joined."""
    right, other = (build_model("qwen2", tmp_path, seed=seed) for seed in (0, 1))
    settings: dict[str, Any] = SHORT_TIMEOUTS | {
        "per_node": {"decode-0": {"model": str(other)}},
        "wait_ready": False,
    }
    cluster = Cluster(tmp_path / "run", model=str(right), dtype="float32", threads="1", **settings)
    async with cluster:
        said = await wait_refused(cluster, "decode-0")
        assert "has weights_digest" in said
        assert "the coordinator's --model has" in said
        assert pids_by_node(await cluster.get_status()) == {}
    cluster.assert_clean()


async def test_second_node_of_the_same_name_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(
        tmp_path,
        per_node={"twin": {"name": "decode-0"}},
        also={"twin": "decode-0"},
        held_back=["twin"],
        **PACED_SETTINGS,
    )
    async with cluster:
        pids = pids_by_node(await cluster.get_status())
        prompt = list(range(1, 40))
        async with running_stream(cluster, prompt, LONG_OUTPUT) as answer:
            cluster.start("twin")
            await cluster.wait_status(
                lambda status: status.counters.get('baton_joins_total{outcome="refused"}', 0) >= 2
            )
            for salt in range(5):
                found = await cluster.generate([salt, 2, 3], max_tokens=5, ignore_eos=True)
                assert list(found.tokens) == paced_reference_tokens([salt, 2, 3], 5)
            assert list((await answer).tokens) == paced_reference_tokens(prompt, LONG_OUTPUT)
        assert pids_by_node(await cluster.get_status()) == pids
        assert await read_counter(cluster, 'baton_joins_total{outcome="joined"}') == 1
        said = [
            line
            for line in cluster.log_tail("twin").splitlines()
            if "join refused for now, retrying" in line
        ]
        assert len(said) == 1  # it does not spin, and does not fill the log
        assert f"is in use by process {pids['decode-0']}" in said[0]
        assert "--name" in said[0]
        cluster.terminate("decode-0")
        await cluster.wait_status(
            lambda status: pids_by_node(status) == {"decode-0": cluster.get_pids()["twin"]}
        )
        assert list(
            (await cluster.generate(prompt, max_tokens=5, ignore_eos=True)).tokens
        ) == paced_reference_tokens(prompt, 5)
        await cluster.wait_idle()
    cluster.assert_clean()


async def test_small_node_does_not_lower_request_limits(tmp_path: Path) -> None:
    """Limits of requests stay, and running requests wait for a node that can hold them."""
    per_node = {"decode-1": {"max_model_len": 64}}
    settings = PACED_SETTINGS | {"max_model_len": 1024}
    cluster = Cluster(
        tmp_path,
        per_node=per_node,
        also={"decode-1": "decode-0"},
        held_back=["decode-1"],
        **settings,
    )
    async with cluster:
        prompt = list(range(1, 200))
        await cluster.arm_failpoints(
            "decode-0", "decode.step.before=delay(0.3)"
        )  # it is not done when its node dies
        async with running_stream(cluster, prompt, LONG_OUTPUT) as answer:
            cluster.start("decode-1")
            await cluster.wait_status(lambda status: len(status.nodes) == 2)
            other = await cluster.generate(prompt[50:], max_tokens=5, ignore_eos=True)
            assert other.timeline.decode_node == "decode-0"
            cluster.kill("decode-0")
            await cluster.wait_status(lambda status: len(status.nodes) == 1)
            short = await cluster.generate([1, 2, 3], max_tokens=5, ignore_eos=True)
            assert short.timeline.decode_node == "decode-1"
            assert not answer.done()
            cluster.start("decode-0")
            async with asyncio.timeout(TIMEOUT_SECONDS):
                assert list((await answer).tokens) == paced_reference_tokens(prompt, LONG_OUTPUT)
        await cluster.wait_idle()
    cluster.assert_clean()
