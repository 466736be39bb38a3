"""One table of bad requests, two front doors: the exact status, code and field of each, and nothing submitted."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import pytest_asyncio

from baton.limits import MAX_BODY_BYTES, MAX_SEED
from baton.pb import generation_pb2 as pb
from tests.integration.front_fixtures import BOUNDS, Front, grpc_error, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

INVALID, TOO_LONG, NO_MODEL = "invalid_request", "context_length_exceeded", "model_not_found"
GOOD: dict[str, Any] = {"prompt": [1, 2, 3]}
# A search for the repeated name that looks at every pair would take minutes.
MANY = b'{"prompt": [1], "logit_bias": {%b, "29999": 1}}' % b",".join(b'"%d":1' % number for number in range(30_000))
BIASES = b'{"prompt": [1], "logit_bias": {%b}}' % b",".join(b'"%d":1' % number for number in range(380_000))
VOCAB, CONTEXT = BOUNDS.vocab_size, BOUNDS.max_context


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[Front]:
    async with serving() as running:
        yield running


@dataclass(frozen=True)
class Bad:
    """`body` is JSON fields, or raw bytes."""

    name: str
    body: dict[str, Any] | bytes
    param: str | None
    told: str  # a part of the message
    status: int = 400
    code: str = INVALID


def field(name: str, value: object, told: str, **more: Any) -> Bad:
    return Bad(f"{name}={str(value)[:40]}", GOOD | {name: value}, more.pop("param", name), told, **more)


# What both front doors can be told.
BOTH = [
    Bad("no prompt", {}, "prompt", "missing"),
    Bad("empty token ids", {"prompt": []}, "prompt", "at least one token"),
    Bad("text without tokenizer", {"prompt": "hello"}, "prompt", "no tokenizer files: send token ids"),
    Bad("empty text", {"prompt": ""}, "prompt", "prompt is empty"),
    Bad("token id = vocabulary", {"prompt": [1, VOCAB]}, "prompt", f"token id {VOCAB}: ids are 0 to {VOCAB - 1}"),
    Bad("token id 2**32 - 1", {"prompt": [2**32 - 1]}, "prompt", "token id 4294967295"),
    Bad("prompt fills the context", {"prompt": [1] * CONTEXT}, "prompt", f"{CONTEXT} tokens", code=TOO_LONG),
    Bad("prompt beyond the context", {"prompt": [1] * 2000}, "prompt", "--max-model-len", code=TOO_LONG),
    field("max_tokens", 0, "max_tokens is 0: it must be at least 1"),
    field("max_tokens", CONTEXT - 2, f"together the limit is {CONTEXT}", code=TOO_LONG),
    field("max_tokens", 2**32 - 1, "max_tokens is 4294967295", code=TOO_LONG),
    field("temperature", -0.1, "temperature is -0.1: it must be 0 to 2"),
    field("temperature", 2.5, "temperature is 2.5"),
    field("top_p", 0.0, "top_p is 0.0: it must be above 0 and at most 1"),
    field("top_p", 1.01, "top_p is 1.01"),
    field("top_p", -1.0, "top_p is -1.0"),
    field("top_k", VOCAB + 1, f"it must be 0 (off) to {VOCAB}"),
    field("min_tokens", 17, "min_tokens is 17: it must be 0 to max_tokens (16)"),
    field("stop_token_ids", [VOCAB], f"stop_token_ids has {VOCAB}"),
    field("stop_token_ids", [1] * 65, "stop_token_ids has 65 ids: at most 64"),
    field("model", "gpt-5", "model is 'gpt-5': the model served here is 'demo'", status=404, code=NO_MODEL),
    field("model", "m" * 200, "m...", status=404, code=NO_MODEL),
]

# What only JSON can say: gRPC's wire types rule it out.
HTTP_ONLY = [
    Bad("empty body", b"", None, "not JSON"),
    Bad("cut off", b'{"prompt": [1', None, "not JSON"),
    Bad("trailing comma", b'{"prompt": [1],}', None, "not JSON"),
    Bad("NaN", b'{"prompt": [1], "temperature": NaN}', None, "not JSON"),
    Bad("invalid UTF-8", b'{"prompt": "\xff"}', None, "not JSON"),
    Bad("lone surrogate", b'{"prompt": "\\ud800"}', None, "not JSON"),
    Bad("an array", b"[1, 2]", None, "must be a JSON object"),
    Bad("a number", b"5", None, "must be a JSON object"),
    Bad("deep nesting", b"[" * 100_000, None, ""),
    Bad("deep nesting in a field", b'{"prompt": [1], "suffix": ' + b"[" * 20_000, None, "not JSON"),
    Bad(
        "deep nesting in a text",
        b'{"prompt": [1], "user": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        "user",
        "too deeply: Expected `str",
    ),
    Bad("deep nesting in the prompt", b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "prompt", "too deeply"),
    Bad("unknown field", GOOD | {"colour": "red"}, "colour", "colour is not a field"),
    Bad("misspelt field", GOOD | {"max_token": 5}, "max_token", "not a field"),
    Bad("prompt is a number", {"prompt": 5}, "prompt", "wrong type"),
    Bad("prompt is null", {"prompt": None}, "prompt", "missing"),
    Bad("list of texts", {"prompt": ["a", "b"]}, "prompt", "no tokenizer files: send token ids"),
    Bad("a bad prompt among others", {"prompt": [[1], [2, VOCAB]]}, "prompt", f"prompt[1] has token id {VOCAB}"),
    Bad("an empty prompt among others", {"prompt": [[1], []]}, "prompt", "prompt[1] is empty"),
    Bad("too many prompts", {"prompt": [[1]] * 129}, "prompt", "129 prompts: it must be 1 to 128"),
    Bad("too many choices", {"prompt": [[1]] * 17, "n": 16}, "n", "together at most 256"),
    Bad("text among ids", {"prompt": [1, "a"]}, "prompt", "prompt[1] and prompt[0] differ"),
    Bad("ids among texts", {"prompt": ["a", [1]]}, "prompt", "prompt[1] and prompt[0] differ"),
    Bad("a field twice", b'{"prompt": [1], "n": 1, "n": 1}', "n", "n is given twice"),
    Bad("a field twice, inside", b'{"prompt": [1], "logit_bias": {"5": 1, "5": 2}}', "5", "5 is given twice"),
    Bad("a field twice, oddly spaced", b'{"prompt": [1], "n"\n:1, "n"\t:1}', "n", "n is given twice"),
    Bad("a field twice, among very many", MANY, "29999", "29999 is given twice"),
    Bad("very many biases", BIASES, None, "the body has 380002 strings: at most 65536"),
    Bad(
        "many biases", GOOD | {"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias", "has 1025 entries"
    ),
    Bad("very many names", GOOD | {"suffix": [{"a": 1}] * 33_000}, None, "names: at most 32768"),
    Bad("very many arrays", GOOD | {"suffix": [[]] * 33_000}, None, "33003 objects and arrays: at most 32768"),
    Bad("very many values", {"prompt": [1] * (2**20 + 2)}, None, "values: at most 1048576"),
    field("stop", ["a"] * 17, "stop has 17 strings: at most 16"),
    Bad("of a wrong type, then not JSON", b'{"prompt": [1], "user": 5, "n": 01}', None, "not JSON"),
    Bad("of a wrong type, then cut off", b'{"prompt": [1], "user": [5', None, "not JSON"),
    Bad("of a wrong type, with invalid UTF-8", b'{"prompt": [1], "user": ["\xff"]}', None, "not JSON"),
    Bad("bool among ids", {"prompt": [1, True]}, "prompt", "prompt[1]"),
    Bad("float among ids", {"prompt": [1.5]}, "prompt", "prompt[0]"),
    Bad("negative id", {"prompt": [-1]}, "prompt", "token id -1"),
    Bad("huge id", {"prompt": [10**30]}, "prompt", "token id 1000000"),
    field("max_tokens", -1, "max_tokens is -1"),
    field("max_tokens", "5", 'max_tokens is "5"'),
    field("max_tokens", True, "max_tokens is true"),
    field("max_tokens", 1.5, "max_tokens is 1.5"),
    field("max_tokens", 10**30, "max_tokens is 1000000", code=TOO_LONG),
    Bad("temperature overflows", b'{"prompt": [1], "temperature": 1e999}', "temperature", "out of range"),
    field("temperature", "1", 'temperature is "1"'),
    field("temperature", False, "temperature is false"),
    field("top_k", -2, "top_k is -2"),
    field("top_p", [], "top_p is []"),
    field("seed", MAX_SEED + 1, "it must fit 64 bits"),
    field("seed", 1.0, "seed is 1.0"),
    field("min_tokens", -1, "min_tokens is -1"),
    field("ignore_eos", 1, "ignore_eos is 1"),
    field("stream", "yes", 'stream is "yes"'),
    field("return_token_ids", 0, "return_token_ids is 0"),
    field("model", 5, "model is 5"),
    field("user", 5, "user is 5"),
    field("stop_token_ids", [-1], "stop_token_ids has -1"),
    field("stop_token_ids", "eos", 'stop_token_ids is "eos"'),
    field("stream_options", {"include_usage": True}, "stream is not true"),
    Bad("unknown stream option", GOOD | {"stream_options": {"x": 1}}, "stream_options.x", "not a field"),
    field("stream_options", {"include_usage": 1}, 'stream_options is {"include_usage":1}'),
    Bad("id overflows", b'{"prompt": [1e999]}', "prompt", "out of range"),
    field("n", True, "n is true"),
    field("n", -1, "n is -1: it must be 1 to 16"),
    field("best_of", 3, "best_of is 3: not available, it must be null or n (1)"),
    field("echo", 0, "echo is 0"),
    field("logprobs", True, "logprobs is true"),
    field("logprobs", -1, "logprobs is -1: it must be 0 to 20"),
    field("first_choice", -1, "first_choice is -1"),
    field("logit_bias", {"five": 1}, "logit_bias has the key 'five': keys are token ids"),
    field("logit_bias", {"-5": 1}, "logit_bias has the key '-5'"),
    field("logit_bias", {"5": 1, "05": 1}, "logit_bias has token id 5 twice"),
    field("logit_bias", {"5": "1"}, "logit_bias is"),
    field("stop", [5], "stop is [5]"),
    field("suffix", "", "suffix is"),
    field("priority", "high", "priority is"),
]

# What only protobuf can say: JSON has no such numbers.
GRPC_ONLY = [
    Bad("temperature NaN", GOOD | {"temperature": float("nan")}, "temperature", "temperature is nan"),
    Bad("temperature infinite", GOOD | {"temperature": float("inf")}, "temperature", "temperature is inf"),
    Bad("top_p NaN", GOOD | {"top_p": float("nan")}, "top_p", "top_p is nan"),
]


def by_name(bad: Bad) -> str:
    return bad.name


@pytest.mark.parametrize("bad", BOTH + HTTP_ONLY, ids=by_name)
async def test_http(front: Front, bad: Bad) -> None:
    before = len(front.refused)
    body = {"content": bad.body} if isinstance(bad.body, bytes) else {"json": bad.body}
    response = await front.http.post("/v1/completions", **body)
    assert response.status_code == bad.status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", bad.code, bad.param)
    assert bad.told in error["message"]
    assert front.brain.submissions == []
    assert front.refused[before:] == [bad.code]


@pytest.mark.parametrize("streaming", [False, True], ids=["once", "stream"])
@pytest.mark.parametrize("bad", BOTH + GRPC_ONLY, ids=by_name)
async def test_grpc(front: Front, bad: Bad, streaming: bool) -> None:
    before = len(front.refused)
    code, trailing, details = await refusal(front, to_grpc(bad.body), streaming)
    assert code is {400: grpc.StatusCode.INVALID_ARGUMENT, 404: grpc.StatusCode.NOT_FOUND}[bad.status]
    assert trailing.get("baton-error-code") == bad.code
    assert trailing.get("baton-error-param") == bad.param
    assert bad.told in details
    assert front.brain.submissions == []
    assert front.refused[before:] == [bad.code]


async def test_grpc_refuses_fields_it_does_not_know(front: Front) -> None:
    raw = to_grpc(GOOD).SerializeToString() + bytes([(99 << 3 & 0x7F) | 0x80, 99 << 3 >> 7, 5])
    code, trailing, details = await refusal(front, pb.GenerateRequest.FromString(raw), streaming=False)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert trailing["baton-error-param"] == "99"
    assert "field number 99" in details


async def test_grpc_bounds_the_size_of_a_message(front: Front) -> None:
    request = pb.GenerateRequest(text="x" * (MAX_BODY_BYTES + 1))
    code, _, _ = await refusal(front, request, streaming=False)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert front.brain.submissions == []


async def test_every_unserved_field_may_be_null_or_at_its_default(front: Front) -> None:
    nothing = [
        "n",
        "first_choice",
        "best_of",
        "echo",
        "logprobs",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "stop",
    ]
    nothing += ["suffix", "user", "stream_options", "min_p", "repetition_penalty", "priority", "max_tokens"]
    nothing += ["model"]
    nothing += ["temperature", "top_k", "top_p", "seed", "min_tokens", "ignore_eos", "stop_token_ids", "stream"]
    defaults = {"n": 1, "best_of": 1, "echo": False, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}}
    defaults |= {"stop": [], "user": "me", "min_p": 0.0, "repetition_penalty": 1.0, "priority": 0}
    for fields in (dict.fromkeys([*nothing, "return_token_ids"]), defaults):
        response = await front.http.post("/v1/completions", json=GOOD | fields)
        assert response.status_code == 200, response.text
    assert front.brain.submissions[0].sampling.max_tokens == 16
    front.brain.submissions.clear()


def to_grpc(body: dict[str, Any] | bytes) -> pb.GenerateRequest:
    assert isinstance(body, dict)
    fields = dict(body)
    prompt = fields.pop("prompt", None)
    if isinstance(prompt, str):
        fields["text"] = prompt
    elif prompt is not None:
        fields["token_ids"] = {"ids": prompt}
    return pb.GenerateRequest(**fields)


async def refusal(
    front: Front, request: pb.GenerateRequest, streaming: bool
) -> tuple[grpc.StatusCode, dict[str, str], str]:
    error = await grpc_error((front.stub.Generate if streaming else front.stub.GenerateOnce)(request))
    return error.code(), dict(error.trailing_metadata()), error.details()
