"""Choices of one prompt and scores, through the coordinator and its link: real nodes, and scripted
ones."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.cli.supervisor import child_specs
from baton.cli.supervisor.ports import Endpoints
from baton.cluster_link import pb_conversion as wire
from baton.cluster_link.order_codec import attempt_key_from_pb
from baton.cluster_link.report_codec import token_event_to_pb
from baton.config.settings import Config
from baton.errors import Overloaded, ServiceUnavailable
from baton.pb import cluster_pb2 as pb
from baton.types import (
    FinishReason,
    Incarnation,
    RequestId,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
    mint_id,
)
from coordinator.generation import FinishedEvent, PromptLogprobsEvent, TokensEvent
from tests.fake_nodes import FakeNode
from tests.fork_server import start_process
from tests.integration.coordinator_harness import (
    CoordinatorHarness,
    collect_stream,
    running_coordinator,
)
from tests.models import build_model
from tests.new_requests import make_choices, make_request

TOKEN = "of-this-cluster"
PROMPT = tuple(range(3, 123))
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=77, ignore_eos=True)
START = 60.0  # seconds that nodes may take to join


@asynccontextmanager
async def node_processes(
    coordinator: CoordinatorHarness, folder: Path, **settings: Any
) -> AsyncIterator[None]:
    """One prefill and one decode node, each a process, joined to the coordinator."""
    config, _ = child_specs.complete_config(
        Config(
            kv_memory="16MiB",
            state_dir=str(folder),
            segment_dir=str(folder),
            cluster_token=TOKEN,
            **settings,
        )
    )
    where = Endpoints(http="", grpc="", admin="", cluster=coordinator.cluster_port_address)
    specs = child_specs.make_child_specs(
        config, where, environ=os.environ, cores=2, supervisor=os.getpid()
    )
    logs = [(folder / f"{spec.name}.log").open("wb") for spec in specs]
    processes = [
        start_process(spec.module, spec.environ, log.fileno())
        for spec, log in zip(specs, logs, strict=True)
        if spec.name != child_specs.COORDINATOR
    ]
    try:
        await coordinator.wait_until(
            lambda: len(coordinator.dispatcher.brain.node_registry.nodes) == len(processes), START
        )
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            await asyncio.to_thread(process.wait, START)
        for log in logs:
            log.close()


async def test_choices_compute_their_prompt_once(tmp_path: Path) -> None:
    model = build_model("llama", tmp_path)
    async with (
        running_coordinator(model=str(model), cluster_token=TOKEN) as coordinator,
        node_processes(coordinator, tmp_path, model=str(model)),
    ):
        choices = make_choices(PROMPT, SAMPLED, 30.0, count=4)
        answers = await asyncio.gather(
            *map(collect_stream, await coordinator.dispatcher.submit_requests(choices))
        )
        counted = dict(coordinator.dispatcher.brain.counters.prompt_tokens)
        assert counted["computed_prefill"] == len(PROMPT)
        assert counted["computed_decode"] <= 3 * 16, "no more than what does not fill a block"
        assert [done.timeline.prefill_node for _, done in answers] == ["prefill-0", "", "", ""]
        assert coordinator.dispatcher.brain.counters.replaced_attempts == {}
        alone = [
            await collect_stream(
                await coordinator.dispatcher.submit_request(
                    replace(one, id=RequestId(mint_id()), leader_id=None, cache_salt=b"cold"),
                    internal=True,
                )
            )
            for one in choices
        ]
        assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in alone]
        assert len({tokens for tokens, _ in answers}) == 4, "each choice draws noise of its own"


async def test_several_prompts_with_several_choices_are_all_answered(tmp_path: Path) -> None:
    prompts = [PROMPT, tuple(range(500, 550)), (7, 8)]
    requests = [one for prompt in prompts for one in make_choices(prompt, SAMPLED, 30.0, count=3)]
    async with (
        running_coordinator(engine="paced", model="paced", cluster_token=TOKEN) as coordinator,
        node_processes(coordinator, tmp_path, engine="paced", paced_step_ms=0.5, paced_reread=True),
    ):
        answers = await asyncio.gather(
            *map(collect_stream, await coordinator.dispatcher.submit_requests(requests))
        )
        assert [len(tokens) for tokens, _ in answers] == [12] * 9
        assert coordinator.dispatcher.brain.counters.prompt_tokens["computed_prefill"] == sum(
            map(len, prompts)
        )
        assert (
            coordinator.dispatcher.brain.queued_requests
            == coordinator.dispatcher.brain.running_requests
            == 0
        )


async def test_request_group_is_admitted_as_a_whole_or_not_at_all() -> None:
    async with (
        running_coordinator(max_queue=4) as coordinator,
        coordinator.make_node("p0", "prefill"),
        coordinator.make_node("d0", "decode") as decode,
    ):
        streams = await coordinator.dispatcher.submit_requests(
            make_choices(PROMPT, SAMPLED, 5.0, count=4)
        )
        with pytest.raises(Overloaded):
            await coordinator.dispatcher.submit_requests(
                make_choices(PROMPT, SAMPLED, 5.0, count=2)
            )
        assert coordinator.dispatcher.brain.list_active_requests() == [
            stream.id for stream in streams
        ]
        await decode.drop_connection()
        await coordinator.wait_until(
            lambda: len(coordinator.dispatcher.brain.node_registry.nodes) == 1
        )
        for stream in streams:
            stream.cancel()
        waiting = asyncio.create_task(
            coordinator.dispatcher.submit_requests(make_choices(PROMPT, SAMPLED, 5.0, count=4))
        )
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        assert coordinator.dispatcher.brain.list_active_requests() == []
        with pytest.raises(ServiceUnavailable):
            await coordinator.dispatcher.submit_requests(
                make_choices(PROMPT, SAMPLED, 5.0, count=4)
            )
        assert coordinator.dispatcher.brain.list_active_requests() == []


FIRST_SCORE = TokenLogprobs(-0.5, ((5, -0.25), (6, -0.5)))
SECOND_SCORE = TokenLogprobs(-1.0, ((7, -1.0), (8, -2.0)))


async def answer_with_scores(
    coordinator: CoordinatorHarness, prefill: FakeNode, decode: FakeNode
) -> None:
    """Decode's stream is the faster one: its token is there before the scores of the prompt."""
    submit = await decode.next_order("submit")
    await prefill.next_order("prefill")
    key = submit.work.key
    await decode.send_reserved(submit)
    await prefill.next_order("ticket")
    for index, finish in enumerate((None, FinishReason.LENGTH)):
        token = TokenEvent(attempt_key_from_pb(key), index, 5, finish, FIRST_SCORE)
        await decode.send_message(tokens=pb.Tokens(tokens=[token_event_to_pb(token)]))
    await decode.send_heartbeat()
    told = coordinator.dispatcher.brain.node_registry.nodes[Incarnation(decode.incarnation)]
    await coordinator.wait_until(lambda: told.stats is not None)  # and of what came before
    for first, score in ((1, FIRST_SCORE), (2, SECOND_SCORE)):
        scores = pb.PromptScores(key=key, first=first, scores=[wire.logprobs_to_pb(score)])
        await prefill.send_message(prompt_scores=scores)


async def test_logprobs_arrive_unchanged() -> None:
    async with (
        running_coordinator() as coordinator,
        coordinator.make_node("p0", "prefill") as prefill,
        coordinator.make_node("d0", "decode") as decode,
    ):
        prefill.run_script(answer_with_scores(coordinator, prefill, decode))
        sampling = SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=2)
        stream = await coordinator.dispatcher.submit_request(
            make_request((4, 5, 6), sampling, 60.0)
        )
        events = [event async for event in stream]
        assert events[:2] == [
            PromptLogprobsEvent((FIRST_SCORE, SECOND_SCORE)),
            TokensEvent((5, 5), (FIRST_SCORE, FIRST_SCORE)),
        ]
        assert isinstance(events[2], FinishedEvent)
        assert len(events) == 3


async def test_malformed_logprobs_end_the_nodes_stream() -> None:
    async with (
        running_coordinator() as coordinator,
        coordinator.make_node("p0", "prefill") as prefill,
        coordinator.make_node("d0", "decode"),
    ):
        sampling = SamplingParams(max_tokens=2, prompt_logprobs=2)
        await coordinator.dispatcher.submit_request(make_request((4, 5), sampling, 10.0))
        key = (await prefill.next_order("prefill")).work.key
        scores = wire.logprobs_to_pb(FIRST_SCORE)
        scores.top_ids.append(9)
        await prefill.send_message(prompt_scores=pb.PromptScores(key=key, first=1, scores=[scores]))
        await prefill.wait_stream_end()
        assert coordinator.dispatcher.brain.counters.dropped_messages == {"damaged": 1}
