"""Scores on their way out of a node: with tokens, ahead of them, across the hand-off. And choices
on a decode node."""

import math
from typing import Any

import pytest

from baton.cluster_link import pb_conversion as wire
from baton.cluster_link.messages import CancelOrder, DecodeOrder, PrefillOrder
from baton.cluster_link.order_codec import attempt_key_from_pb
from baton.cluster_link.report_codec import token_event_from_pb
from baton.errors import Cancelled
from baton.types import AttemptSpec, TicketId, TokenLogprobs
from kv_transfer.plane import InboundLost, InboundSealed, InboundStarted, SealInfo
from tests.paced_reference import paced_reference_logprobs, paced_reference_tokens
from tests.unit.node_roles.decode_bench import DecodeBench as DecodeNode
from tests.unit.node_roles.decode_bench import hand_over as hand_over_to
from tests.unit.node_roles.decode_bench import run
from tests.unit.node_roles.prefill_bench import PrefillBench as PrefillNode
from tests.unit.node_roles.role_bench import WRITER, RoleBench
from tests.unit.node_roles.role_bench import make_work as plain_work

PROMPT = tuple(range(1, 151))


def make_scored_work(prompt: tuple[int, ...] = PROMPT, **fields: Any) -> AttemptSpec:
    return plain_work(prompt, **fields)


def output_scores(work: AttemptSpec, top: int) -> list[TokenLogprobs]:
    """Those that a client must see, over every attempt."""
    prompt, count = work.request.prompt_token_ids, work.request.sampling.max_tokens
    return paced_reference_logprobs(
        [*prompt, *paced_reference_tokens(prompt, count, 1000)], top, 1000
    )[len(prompt) - 1 :]


def sent_scores(node: RoleBench) -> list[TokenLogprobs]:
    events = [
        token_event_from_pb(token)
        for message in node.pop_messages("tokens")
        for token in message.tokens
    ]
    return [event.logprobs for event in events if event.logprobs is not None]


def sent_prompt_scores(node: RoleBench, work: AttemptSpec) -> list[TokenLogprobs]:
    found: list[TokenLogprobs] = []
    for message in node.pop_messages("prompt_scores"):
        assert (attempt_key_from_pb(message.key), message.first) == (work.key, len(found) + 1)
        found += [wire.logprobs_from_pb(score) for score in message.scores]
    return found


def kinds(node: RoleBench) -> list[str]:
    return [message.WhichOneof("message") or "" for message in node.sent_messages]


def disaggregated(work: AttemptSpec) -> tuple[list[TokenLogprobs], list[TokenLogprobs]]:
    """Prompt scores and scores of tokens, from a prefill node and then a decode node."""
    prefill, decode = PrefillNode(), DecodeNode()
    prefill.send_item(PrefillOrder(work, needs_no_decode=False))
    while prefill.step():
        pass
    assert kinds(prefill)[-1] == "prefill_ended"
    decode.send_item(DecodeOrder(work, WRITER))
    ticket = decode.ticket
    decode.send_item(InboundStarted(ticket.id))
    decode.land_handoff(ticket, work)
    decode.send_item(InboundSealed(ticket.id, prefill.plane.sealed[work.key], 1))
    while decode.step():
        pass
    return sent_prompt_scores(prefill, work), sent_scores(decode)


def colocated(work: AttemptSpec) -> tuple[list[TokenLogprobs], list[TokenLogprobs]]:
    node = DecodeNode()
    node.send_item(DecodeOrder(work, None))
    while node.step():
        pass
    assert "prompt_scores" not in kinds(node)[kinds(node).index("admitted") :], (
        "scores come before what follows them"
    )
    return sent_prompt_scores(node, work), sent_scores(node)


@pytest.mark.parametrize("top", [0, 3, 20])
def test_disaggregated_scores_equal_colocated(top: int) -> None:
    work = make_scored_work(logprobs=top, prompt_logprobs=top)
    expected = paced_reference_logprobs(PROMPT, top, 1000), output_scores(work, top)
    assert disaggregated(work) == colocated(work) == expected


def test_no_scores_unless_requested() -> None:
    work = make_scored_work()
    assert disaggregated(work) == colocated(work) == ([], [])


def test_a_resumed_attempt_scores_the_rest() -> None:
    whole = make_scored_work(max_tokens=10, logprobs=2)
    emitted = paced_reference_tokens(PROMPT, 6, 1000)
    work = make_scored_work(max_tokens=10, emitted=emitted, attempt=2, logprobs=2)
    assert disaggregated(work)[1] == colocated(work)[1] == output_scores(whole, 2)[6:]


def test_prefill_without_decode_reports_the_score() -> None:
    node, work = PrefillNode(), make_scored_work(max_tokens=1, logprobs=1, prompt_logprobs=1)
    node.send_item(PrefillOrder(work, needs_no_decode=True))
    while node.step():
        pass
    assert kinds(node)[-2:] == ["prefill_ended", "tokens"]
    assert sent_scores(node) == output_scores(work, 1)
    assert sent_prompt_scores(node, work) == paced_reference_logprobs(PROMPT, 1, 1000)
    assert node.count_held_blocks() == {}


def test_cancelled_attempt_reports_no_scores() -> None:
    node, work = PrefillNode(), make_scored_work(prompt_logprobs=1)
    node.send_item(PrefillOrder(work, needs_no_decode=False))
    node.step()
    assert len(sent_prompt_scores(node, work)) == 64
    node.send_item(CancelOrder(work.key, Cancelled("client gone")))
    assert not node.step()
    assert node.sent_messages == []


def test_long_prompts_are_told_in_bounded_messages() -> None:
    node, work = (
        PrefillNode(num_blocks=256),
        make_scored_work(tuple(range(1, 901)) * 4, prompt_logprobs=0),
    )
    reporter, score = node.role._reporter, TokenLogprobs(-0.5)  # type: ignore[attr-defined]
    reporter.report_prompt_logprobs(work.key, 7, [score] * 10_000)
    sizes = [(message.first, len(message.scores)) for message in node.pop_messages("prompt_scores")]
    assert sizes == [(7, 4096), (4103, 4096), (8199, 1808)]


# across the hand-off


RIGHT = TokenLogprobs(-0.5, ((4, -0.25), (5, -0.75)))
WRONG = {
    "none": None,
    "positive": TokenLogprobs(0.1, RIGHT.top_logprobs),
    "not a number": TokenLogprobs(math.nan, RIGHT.top_logprobs),
    "impossible": TokenLogprobs(-math.inf, RIGHT.top_logprobs),
    "too few": TokenLogprobs(-0.5, RIGHT.top_logprobs[:1]),
    "too many": TokenLogprobs(-0.5, (*RIGHT.top_logprobs, (6, -1.0))),
    "no such token": TokenLogprobs(-0.5, ((4, -0.25), (1000, -0.75))),
    "positive alternative": TokenLogprobs(-0.5, ((4, 0.25), (5, -0.75))),
    "alternative that is not a number": TokenLogprobs(-0.5, ((4, -0.25), (5, math.nan))),
}


def sealed_with(node: DecodeNode, work: AttemptSpec, score: TokenLogprobs | None) -> TicketId:
    node.send_item(DecodeOrder(work, WRITER))
    ticket = node.ticket
    node.send_item(InboundStarted(ticket.id))
    node.land_handoff(ticket, work)
    node.send_item(
        InboundSealed(
            ticket.id,
            SealInfo(
                (*work.emitted_token_ids, *paced_reference_tokens(work.context_token_ids, 1, 1000)),
                score,
            ),
            1,
        )
    )
    return ticket.id


@pytest.mark.parametrize("score", WRONG.values(), ids=WRONG)
def test_a_seal_with_another_score_than_is_due_is_not_committed(
    score: TokenLogprobs | None,
) -> None:
    node, work = DecodeNode(), make_scored_work(logprobs=2)
    ticket = sealed_with(node, work, score)
    assert node.plane.committed == []
    node.send_item(InboundLost(ticket, node.plane.revoked[ticket], is_fenced=True))
    assert node.pop_messages("failed")[0].error.code == "incomplete"
    assert node.count_held_blocks() == {}


def test_a_seal_with_a_score_that_nobody_asked_for_is_not_committed() -> None:
    node = DecodeNode()
    ticket = sealed_with(node, make_scored_work(), RIGHT)
    assert node.plane.committed == []
    assert node.plane.revoked[ticket].code == "incomplete"


def test_the_right_score_goes_on_with_its_token() -> None:
    node, work = DecodeNode(), make_scored_work(max_tokens=1, logprobs=2)
    ticket = sealed_with(node, work, RIGHT)
    assert node.plane.committed == [ticket]
    assert sent_scores(node) == [RIGHT]


# what a node takes nobody's word for


@pytest.mark.parametrize(
    "fields", [{"logit_bias": ((1000, 1.0),)}, {"logprobs": 21}, {"repetition_penalty": 0.0}]
)
def test_fields_out_of_bounds_fail_their_attempt_alone(fields: dict[str, Any]) -> None:
    work = make_scored_work(**fields)
    prefill, decode = PrefillNode(), DecodeNode()
    prefill.send_item(PrefillOrder(work, needs_no_decode=False))
    decode.send_item(DecodeOrder(work, None))
    for node in (prefill, decode):
        assert [failed.error.code for failed in node.pop_messages("failed")] == ["invalid_request"]
        assert not node.step()
        assert node.count_held_blocks() == {}


# choices


@pytest.mark.parametrize("steps", [0, 3, 100])
@pytest.mark.parametrize("length", [32, 33, 40])
def test_a_second_choice_needs_no_writer(length: int, steps: int) -> None:
    node, prompt = DecodeNode(), PROMPT[:length]
    first, second = (make_scored_work(prompt, choice=number, max_tokens=20) for number in range(2))
    hand_over_to(node, first)
    for _ in range(steps):
        node.step()
    node.sent_messages.clear()
    node.send_item(DecodeOrder(second, WRITER))
    reserved = node.pop_messages("reserved")[0]
    assert (reserved.HasField("ticket"), reserved.held_tokens) == (False, length - 1)
    while node.step():
        pass
    admitted = node.pop_messages("admitted")[0]
    assert (admitted.computed_tokens, admitted.cached_tokens, admitted.received_tokens) == (
        1,
        length - 1,
        0,
    )
    tokens = [
        token
        for message in node.pop_messages("tokens")
        for token in message.tokens
        if token.key.choice == 1
    ]
    assert [token.token for token in tokens] == paced_reference_tokens(prompt, 20, 1000)
    assert node.count_held_blocks() == {}


def test_scored_prompt_is_handed_off() -> None:
    node, prompt = DecodeNode(), PROMPT[:32]
    hand_over_to(node, make_scored_work(prompt))
    run(node, make_scored_work(prompt))
    node.sent_messages.clear()
    node.send_item(DecodeOrder(make_scored_work(prompt, request="b", prompt_logprobs=0), WRITER))
    reserved = node.pop_messages("reserved")[0]
    assert (reserved.held_tokens, len(reserved.ticket.offsets)) == (0, 2)
