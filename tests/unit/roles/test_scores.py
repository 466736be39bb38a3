"""Scores on their way out of a node: with tokens, ahead of them, across the hand-off. And choices on a decode node."""

import math
from typing import Any

import pytest

from baton import wire
from baton.errors import Cancelled
from baton.types import TicketId, TokenScore, Work
from kv_transfer.plane import Lost, Sealed, SealInfo, Started
from node_engine.core.messages import Cancel, Prefill, Submit
from node_engine.paced import paced_reference, paced_scores
from tests.unit.roles.bench import WRITER, Bench
from tests.unit.roles.bench import work as plain_work
from tests.unit.roles.test_decode_role import Node as DecodeNode
from tests.unit.roles.test_decode_role import hand_over as hand_over_to
from tests.unit.roles.test_decode_role import run
from tests.unit.roles.test_prefill_role import Node as PrefillNode

PROMPT = tuple(range(1, 151))


def work(prompt: tuple[int, ...] = PROMPT, **fields: Any) -> Work:
    return plain_work(prompt, **fields)


def output_scores(job: Work, top: int) -> list[TokenScore]:
    """Those that a client must see, over every attempt."""
    prompt, count = job.request.prompt, job.request.sampling.max_tokens
    return paced_scores([*prompt, *paced_reference(prompt, count, 1000)], top, 1000)[len(prompt) - 1 :]


def sent_scores(node: Bench) -> list[TokenScore]:
    events = [wire.token_from_pb(token) for message in node.take("tokens") for token in message.tokens]
    return [event.score for event in events if event.score is not None]


def sent_prompt_scores(node: Bench, job: Work) -> list[TokenScore]:
    found: list[TokenScore] = []
    for message in node.take("prompt_scores"):
        assert (wire.key_from_pb(message.key), message.first) == (job.key, len(found) + 1)
        found += [wire.score_from_pb(score) for score in message.scores]
    return found


def kinds(node: Bench) -> list[str]:
    return [message.WhichOneof("message") or "" for message in node.sent]


def disaggregated(job: Work) -> tuple[list[TokenScore], list[TokenScore]]:
    """Prompt scores and scores of tokens, from a prefill node and then a decode node."""
    prefill, decode = PrefillNode(), DecodeNode()
    prefill.tell(Prefill(job, alone=False))
    while prefill.step():
        pass
    assert kinds(prefill)[-1] == "prefill_ended"
    decode.tell(Submit(job, WRITER))
    ticket = decode.ticket
    decode.tell(Started(ticket.id))
    decode.land(ticket, job)
    decode.tell(Sealed(ticket.id, prefill.plane.sealed[job.key], 1))
    while decode.step():
        pass
    return sent_prompt_scores(prefill, job), sent_scores(decode)


def colocated(job: Work) -> tuple[list[TokenScore], list[TokenScore]]:
    node = DecodeNode()
    node.tell(Submit(job, None))
    while node.step():
        pass
    assert "prompt_scores" not in kinds(node)[kinds(node).index("admitted") :], "scores come before what follows them"
    return sent_prompt_scores(node, job), sent_scores(node)


@pytest.mark.parametrize("top", [0, 3, 20])
def test_disaggregated_is_colocated(top: int) -> None:
    job = work(logprobs=top, prompt_logprobs=top)
    wanted = paced_scores(PROMPT, top, 1000), output_scores(job, top)
    assert disaggregated(job) == colocated(job) == wanted


def test_who_asks_for_nothing_gets_nothing() -> None:
    job = work()
    assert disaggregated(job) == colocated(job) == ([], [])


def test_a_resumed_attempt_scores_the_rest() -> None:
    whole = work(max_tokens=10, logprobs=2)
    emitted = paced_reference(PROMPT, 6, 1000)
    job = work(max_tokens=10, emitted=emitted, attempt=2, logprobs=2)
    assert disaggregated(job)[1] == colocated(job)[1] == output_scores(whole, 2)[6:]


def test_prefill_alone_answers_with_the_score() -> None:
    node, job = PrefillNode(), work(max_tokens=1, logprobs=1, prompt_logprobs=1)
    node.tell(Prefill(job, alone=True))
    while node.step():
        pass
    assert kinds(node)[-2:] == ["prefill_ended", "tokens"]
    assert sent_scores(node) == output_scores(job, 1)
    assert sent_prompt_scores(node, job) == paced_scores(PROMPT, 1, 1000)
    assert node.held() == {}


def test_who_is_cancelled_scores_no_more() -> None:
    node, job = PrefillNode(), work(prompt_logprobs=1)
    node.tell(Prefill(job, alone=False))
    node.step()
    assert len(sent_prompt_scores(node, job)) == 64
    node.tell(Cancel(job.key, Cancelled("client gone")))
    assert not node.step()
    assert node.sent == []


def test_long_prompts_are_told_in_bounded_messages() -> None:
    node, job = PrefillNode(num_blocks=256), work(tuple(range(1, 901)) * 4, prompt_logprobs=0)
    report, score = node.role._report, TokenScore(-0.5)  # type: ignore[attr-defined]
    report.prompt_scores(job.key, 7, [score] * 10_000)
    sizes = [(message.first, len(message.scores)) for message in node.take("prompt_scores")]
    assert sizes == [(7, 4096), (4103, 4096), (8199, 1808)]


# across the hand-off


RIGHT = TokenScore(-0.5, ((4, -0.25), (5, -0.75)))
WRONG = {
    "none": None,
    "positive": TokenScore(0.1, RIGHT.top),
    "not a number": TokenScore(math.nan, RIGHT.top),
    "impossible": TokenScore(-math.inf, RIGHT.top),
    "too few": TokenScore(-0.5, RIGHT.top[:1]),
    "too many": TokenScore(-0.5, (*RIGHT.top, (6, -1.0))),
    "no such token": TokenScore(-0.5, ((4, -0.25), (1000, -0.75))),
    "positive alternative": TokenScore(-0.5, ((4, 0.25), (5, -0.75))),
    "alternative that is not a number": TokenScore(-0.5, ((4, -0.25), (5, math.nan))),
}


def sealed_with(node: DecodeNode, job: Work, score: TokenScore | None) -> TicketId:
    node.tell(Submit(job, WRITER))
    ticket = node.ticket
    node.tell(Started(ticket.id))
    node.land(ticket, job)
    node.tell(Sealed(ticket.id, SealInfo((*job.emitted, *paced_reference(job.context, 1, 1000)), score), 1))
    return ticket.id


@pytest.mark.parametrize("score", WRONG.values(), ids=WRONG)
def test_a_seal_with_another_score_than_is_due_is_not_committed(score: TokenScore | None) -> None:
    node, job = DecodeNode(), work(logprobs=2)
    ticket = sealed_with(node, job, score)
    assert node.plane.committed == []
    node.tell(Lost(ticket, node.plane.revoked[ticket], fenced=True))
    assert node.take("failed")[0].error.code == "incomplete"
    assert node.held() == {}


def test_a_seal_with_a_score_that_nobody_asked_for_is_not_committed() -> None:
    node = DecodeNode()
    ticket = sealed_with(node, work(), RIGHT)
    assert node.plane.committed == []
    assert node.plane.revoked[ticket].code == "incomplete"


def test_the_right_score_goes_on_with_its_token() -> None:
    node, job = DecodeNode(), work(max_tokens=1, logprobs=2)
    ticket = sealed_with(node, job, RIGHT)
    assert node.plane.committed == [ticket]
    assert sent_scores(node) == [RIGHT]


# what a node takes nobody's word for


@pytest.mark.parametrize("fields", [{"logit_bias": ((1000, 1.0),)}, {"logprobs": 21}, {"repetition_penalty": 0.0}])
def test_fields_out_of_bounds_fail_their_attempt_alone(fields: dict[str, Any]) -> None:
    job = work(**fields)
    prefill, decode = PrefillNode(), DecodeNode()
    prefill.tell(Prefill(job, alone=False))
    decode.tell(Submit(job, None))
    for node in (prefill, decode):
        assert [failed.error.code for failed in node.take("failed")] == ["invalid_request"]
        assert not node.step()
        assert node.held() == {}


# choices


@pytest.mark.parametrize("steps", [0, 3, 100])
@pytest.mark.parametrize("length", [32, 33, 40])
def test_a_second_choice_needs_no_writer(length: int, steps: int) -> None:
    node, prompt = DecodeNode(), PROMPT[:length]
    first, second = (work(prompt, choice=number, max_tokens=20) for number in range(2))
    hand_over_to(node, first)
    for _ in range(steps):
        node.step()
    node.sent.clear()
    node.tell(Submit(second, WRITER))
    reserved = node.take("reserved")[0]
    assert (reserved.HasField("ticket"), reserved.held_tokens) == (False, length - 1)
    while node.step():
        pass
    admitted = node.take("admitted")[0]
    assert (admitted.computed_tokens, admitted.cached_tokens, admitted.received_tokens) == (1, length - 1, 0)
    tokens = [token for message in node.take("tokens") for token in message.tokens if token.key.choice == 1]
    assert [token.token for token in tokens] == paced_reference(prompt, 20, 1000)
    assert node.held() == {}


def test_a_prompt_that_is_scored_has_a_writer_all_the_same() -> None:
    node, prompt = DecodeNode(), PROMPT[:32]
    hand_over_to(node, work(prompt))
    run(node, work(prompt))
    node.sent.clear()
    node.tell(Submit(work(prompt, request="b", prompt_logprobs=0), WRITER))
    reserved = node.take("reserved")[0]
    assert (reserved.held_tokens, len(reserved.ticket.offsets)) == (0, 2)
