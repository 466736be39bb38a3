"""Types survive the wire, whatever is in them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster_link import pb_conversion as wire
from baton.cluster_link.order_codec import (
    attempt_spec_from_pb,
    attempt_spec_to_pb,
    ticket_from_pb,
    ticket_to_pb,
)
from baton.cluster_link.report_codec import token_event_from_pb, token_event_to_pb
from baton.errors import ERRORS_BY_CODE, BatonError, error_from_code
from baton.kv.blocks import KVLayout
from baton.limits import MAX_SEED, ModelBounds, check_sampling
from baton.types import (
    AttemptKey,
    AttemptSpec,
    FinishReason,
    GrammarKind,
    Incarnation,
    NodeName,
    PeerAddress,
    Request,
    RequestId,
    SamplingParams,
    SegmentRef,
    StructuredOutput,
    Ticket,
    TicketId,
    TokenEvent,
    TokenLogprobs,
)

tokens = st.integers(0, 2**32 - 1)
keys = st.builds(
    AttemptKey, st.text(max_size=40).map(RequestId), st.integers(0, 2**31), st.integers(0, 16)
)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**31),
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 2**31),
    top_p=st.floats(0.001, 1),
    seed=st.integers(-MAX_SEED - 1, MAX_SEED),
    min_tokens=st.integers(0, 2**31),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(tokens, max_size=4).map(tuple),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.lists(st.tuples(tokens, st.floats(-100, 100)), max_size=4).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    structured_output=st.none()
    | st.builds(StructuredOutput, st.sampled_from(GrammarKind), st.text()),
)
logprobs = st.floats(max_value=0, width=32, allow_nan=False)
scores = st.builds(
    TokenLogprobs, logprobs, st.lists(st.tuples(tokens, logprobs), max_size=4).map(tuple)
)
peers = st.builds(
    PeerAddress,
    st.text(max_size=9).map(NodeName),
    st.text(max_size=9).map(Incarnation),
    st.text(),
    st.text(),
)


@st.composite
def works(draw: st.DrawFn) -> AttemptSpec:
    key = draw(keys)
    prompt = tuple(draw(st.lists(tokens, max_size=20)))
    salt = draw(st.binary(max_size=8))
    request = Request(
        key.request_id, prompt, draw(sampling), draw(st.floats(0, 1e6)), salt, key.choice_index
    )
    return AttemptSpec(key, request, tuple(draw(st.lists(tokens, max_size=5))))


@given(works())
def test_attempt_spec_round_trip(work: AttemptSpec) -> None:
    assert attempt_spec_from_pb(attempt_spec_to_pb(work)) == work
    assert work.context_token_ids == work.request.prompt_token_ids + work.emitted_token_ids


@given(keys, peers, st.lists(st.integers(0, 2**63), max_size=9), st.floats(0, 1e3))
def test_ticket_round_trip(
    key: AttemptKey, peer: PeerAddress, offsets: list[int], ttl: float
) -> None:
    segment = SegmentRef("baton-x", peer.incarnation)
    ticket = Ticket(
        TicketId("t"),
        key,
        peer,
        Incarnation("w"),
        3,
        tuple(offsets),
        77,
        ttl,
        "shm",
        segment,
        2**40,
    )
    assert ticket_from_pb(ticket_to_pb(ticket)) == ticket


@given(keys, st.sampled_from([None, *FinishReason]), st.none() | scores)
def test_token_event_round_trip(
    key: AttemptKey, finish: FinishReason | None, score: TokenLogprobs | None
) -> None:
    event = TokenEvent(key, 5, 17, finish, score)
    assert token_event_from_pb(token_event_to_pb(event)) == event


@pytest.mark.parametrize("seed", [-MAX_SEED - 1, -1, 0, MAX_SEED])
def test_every_accepted_seed_round_trips(seed: int) -> None:
    """Both check the same bounds, before the message and after it."""
    bounds = ModelBounds(vocab_size=10, max_model_len=10, cache_tokens=10)
    key = AttemptKey(RequestId("r"), 0, 0)
    request = Request(key.request_id, (1,), SamplingParams(max_tokens=1, seed=seed), 1.0)
    check_sampling(request.sampling, 1, bounds)
    received = attempt_spec_from_pb(attempt_spec_to_pb(AttemptSpec(key, request))).request.sampling
    assert received.seed == seed
    check_sampling(received, 1, bounds)


def test_layout_round_trip() -> None:
    layout = KVLayout(24, 2, 64, 16, "bfloat16")
    assert wire.layout_from_pb(wire.layout_to_pb(layout)) == layout


def test_every_error_code_round_trip() -> None:
    for code, kind in ERRORS_BY_CODE.items():
        error = wire.error_from_pb(wire.error_to_pb(kind("what", param="prompt")))
        assert type(error) is kind
        assert (error.code, error.message, error.param) == (code, "what", "prompt")
    assert type(error_from_code("from the future", "x")) is BatonError
