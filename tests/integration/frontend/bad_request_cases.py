"""Tables of bad requests: each with the status, code and field of its error."""

from dataclasses import dataclass
from typing import Any

from baton.limits import MAX_SEED
from tests.integration.frontend.frontend_harness import (
    MODEL_BOUNDS,
)

INVALID, TOO_LONG, NO_MODEL = "invalid_request", "context_length_exceeded", "model_not_found"


GOOD_BODY: dict[str, Any] = {"prompt": [1, 2, 3]}


# A search for the repeated name that looks at every pair would take minutes.
MANY = b'{"prompt": [1], "logit_bias": {%b, "29999": 1}}' % b",".join(
    b'"%d":1' % number for number in range(30_000)
)


BIASES = b'{"prompt": [1], "logit_bias": {%b}}' % b",".join(
    b'"%d":1' % number for number in range(380_000)
)


VOCAB, CONTEXT = MODEL_BOUNDS.vocab_size, MODEL_BOUNDS.max_context


@dataclass(frozen=True)
class BadRequestCase:
    """`body` is JSON fields, or raw bytes."""

    name: str
    body: dict[str, Any] | bytes
    expected_param: str | None
    expected_message: str  # a part of the message
    expected_status: int = 400
    expected_code: str = INVALID


def bad_field(name: str, value: object, told: str, **more: Any) -> BadRequestCase:
    return BadRequestCase(
        f"{name}={str(value)[:40]}",
        GOOD_BODY | {name: value},
        more.pop("param", name),
        told,
        **more,
    )


# What both front doors can be told.
BAD_ON_BOTH = [
    BadRequestCase("no prompt", {}, "prompt", "missing"),
    BadRequestCase("empty token ids", {"prompt": []}, "prompt", "at least one token"),
    BadRequestCase(
        "text without tokenizer",
        {"prompt": "hello"},
        "prompt",
        "no tokenizer files: send token ids",
    ),
    BadRequestCase("empty text", {"prompt": ""}, "prompt", "prompt is empty"),
    BadRequestCase(
        "token id = vocabulary",
        {"prompt": [1, VOCAB]},
        "prompt",
        f"token id {VOCAB}: ids are 0 to {VOCAB - 1}",
    ),
    BadRequestCase("token id 2**32 - 1", {"prompt": [2**32 - 1]}, "prompt", "token id 4294967295"),
    BadRequestCase(
        "prompt fills the context",
        {"prompt": [1] * CONTEXT},
        "prompt",
        f"{CONTEXT} tokens",
        expected_code=TOO_LONG,
    ),
    BadRequestCase(
        "prompt beyond the context",
        {"prompt": [1] * 2000},
        "prompt",
        "--max-model-len",
        expected_code=TOO_LONG,
    ),
    bad_field("max_tokens", 0, "max_tokens is 0: it must be at least 1"),
    bad_field(
        "max_tokens", CONTEXT - 2, f"together the limit is {CONTEXT}", expected_code=TOO_LONG
    ),
    bad_field("max_tokens", 2**32 - 1, "max_tokens is 4294967295", expected_code=TOO_LONG),
    bad_field("temperature", -0.1, "temperature is -0.1: it must be 0 to 2"),
    bad_field("temperature", 2.5, "temperature is 2.5"),
    bad_field("top_p", 0.0, "top_p is 0.0: it must be above 0 and at most 1"),
    bad_field("top_p", 1.01, "top_p is 1.01"),
    bad_field("top_p", -1.0, "top_p is -1.0"),
    bad_field("top_k", VOCAB + 1, f"it must be 0 (off) to {VOCAB}"),
    bad_field("min_tokens", 17, "min_tokens is 17: it must be 0 to max_tokens (16)"),
    bad_field("stop_token_ids", [VOCAB], f"stop_token_ids has {VOCAB}"),
    bad_field("stop_token_ids", [1] * 65, "stop_token_ids has 65 ids: at most 64"),
    bad_field(
        "model",
        "gpt-5",
        "model is 'gpt-5': the model served here is 'demo'",
        expected_status=404,
        expected_code=NO_MODEL,
    ),
    bad_field("model", "m" * 200, "m...", expected_status=404, expected_code=NO_MODEL),
]


# What only JSON can say: gRPC's wire types rule it out.
BAD_ON_HTTP = [
    BadRequestCase("empty body", b"", None, "not JSON"),
    BadRequestCase("cut off", b'{"prompt": [1', None, "not JSON"),
    BadRequestCase("trailing comma", b'{"prompt": [1],}', None, "not JSON"),
    BadRequestCase("NaN", b'{"prompt": [1], "temperature": NaN}', None, "not JSON"),
    BadRequestCase("invalid UTF-8", b'{"prompt": "\xff"}', None, "not JSON"),
    BadRequestCase("lone surrogate", b'{"prompt": "\\ud800"}', None, "not JSON"),
    BadRequestCase("an array", b"[1, 2]", None, "must be a JSON object"),
    BadRequestCase("a number", b"5", None, "must be a JSON object"),
    BadRequestCase("deep nesting", b"[" * 100_000, None, ""),
    BadRequestCase(
        "deep nesting in a field", b'{"prompt": [1], "suffix": ' + b"[" * 20_000, None, "not JSON"
    ),
    BadRequestCase(
        "deep nesting in a text",
        b'{"prompt": [1], "user": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        "user",
        "too deeply: Expected `str",
    ),
    BadRequestCase(
        "deep nesting in the prompt",
        b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        "prompt",
        "too deeply",
    ),
    BadRequestCase(
        "unknown field", GOOD_BODY | {"colour": "red"}, "colour", "colour is not a field"
    ),
    BadRequestCase("misspelt field", GOOD_BODY | {"max_token": 5}, "max_token", "not a field"),
    BadRequestCase("prompt is a number", {"prompt": 5}, "prompt", "wrong type"),
    BadRequestCase("prompt is null", {"prompt": None}, "prompt", "missing"),
    BadRequestCase(
        "list of texts", {"prompt": ["a", "b"]}, "prompt", "no tokenizer files: send token ids"
    ),
    BadRequestCase(
        "a bad prompt among others",
        {"prompt": [[1], [2, VOCAB]]},
        "prompt",
        f"prompt[1] has token id {VOCAB}",
    ),
    BadRequestCase(
        "an empty prompt among others", {"prompt": [[1], []]}, "prompt", "prompt[1] is empty"
    ),
    BadRequestCase(
        "too many prompts", {"prompt": [[1]] * 129}, "prompt", "129 prompts: it must be 1 to 128"
    ),
    BadRequestCase(
        "too many choices", {"prompt": [[1]] * 17, "n": 16}, "n", "together at most 256"
    ),
    BadRequestCase(
        "text among ids", {"prompt": [1, "a"]}, "prompt", "prompt[1] and prompt[0] differ"
    ),
    BadRequestCase(
        "ids among texts", {"prompt": ["a", [1]]}, "prompt", "prompt[1] and prompt[0] differ"
    ),
    BadRequestCase("a field twice", b'{"prompt": [1], "n": 1, "n": 1}', "n", "n is given twice"),
    BadRequestCase(
        "a field twice, inside",
        b'{"prompt": [1], "logit_bias": {"5": 1, "5": 2}}',
        "5",
        "5 is given twice",
    ),
    BadRequestCase(
        "a field twice, oddly spaced", b'{"prompt": [1], "n"\n:1, "n"\t:1}', "n", "n is given twice"
    ),
    BadRequestCase("a field twice, among very many", MANY, "29999", "29999 is given twice"),
    BadRequestCase("very many biases", BIASES, None, "the body has 380002 strings: at most 65536"),
    BadRequestCase(
        "many biases",
        GOOD_BODY | {"logit_bias": dict.fromkeys(map(str, range(1025)), 1)},
        "logit_bias",
        "has 1025 entries",
    ),
    BadRequestCase(
        "very many names", GOOD_BODY | {"suffix": [{"a": 1}] * 33_000}, None, "names: at most 32768"
    ),
    BadRequestCase(
        "very many arrays",
        GOOD_BODY | {"suffix": [[]] * 33_000},
        None,
        "33003 objects and arrays: at most 32768",
    ),
    BadRequestCase(
        "very many values", {"prompt": [1] * (2**20 + 2)}, None, "values: at most 1048576"
    ),
    bad_field("stop", ["a"] * 17, "stop has 17 strings: at most 16"),
    BadRequestCase(
        "of a wrong type, then not JSON", b'{"prompt": [1], "user": 5, "n": 01}', None, "not JSON"
    ),
    BadRequestCase(
        "of a wrong type, then cut off", b'{"prompt": [1], "user": [5', None, "not JSON"
    ),
    BadRequestCase(
        "of a wrong type, with invalid UTF-8",
        b'{"prompt": [1], "user": ["\xff"]}',
        None,
        "not JSON",
    ),
    BadRequestCase("bool among ids", {"prompt": [1, True]}, "prompt", "prompt[1]"),
    BadRequestCase("float among ids", {"prompt": [1.5]}, "prompt", "prompt[0]"),
    BadRequestCase("negative id", {"prompt": [-1]}, "prompt", "token id -1"),
    BadRequestCase("huge id", {"prompt": [10**30]}, "prompt", "token id 1000000"),
    bad_field("max_tokens", -1, "max_tokens is -1"),
    bad_field("max_tokens", "5", 'max_tokens is "5"'),
    bad_field("max_tokens", True, "max_tokens is true"),
    bad_field("max_tokens", 1.5, "max_tokens is 1.5"),
    bad_field("max_tokens", 10**30, "max_tokens is 1000000", expected_code=TOO_LONG),
    BadRequestCase(
        "temperature overflows",
        b'{"prompt": [1], "temperature": 1e999}',
        "temperature",
        "out of range",
    ),
    bad_field("temperature", "1", 'temperature is "1"'),
    bad_field("temperature", False, "temperature is false"),
    bad_field("top_k", -2, "top_k is -2"),
    bad_field("top_p", [], "top_p is []"),
    bad_field("seed", MAX_SEED + 1, "it must fit 64 bits"),
    bad_field("seed", 1.0, "seed is 1.0"),
    bad_field("min_tokens", -1, "min_tokens is -1"),
    bad_field("ignore_eos", 1, "ignore_eos is 1"),
    bad_field("stream", "yes", 'stream is "yes"'),
    bad_field("return_token_ids", 0, "return_token_ids is 0"),
    bad_field("model", 5, "model is 5"),
    bad_field("user", 5, "user is 5"),
    bad_field("stop_token_ids", [-1], "stop_token_ids has -1"),
    bad_field("stop_token_ids", "eos", 'stop_token_ids is "eos"'),
    bad_field("stream_options", {"include_usage": True}, "stream is not true"),
    BadRequestCase(
        "unknown stream option",
        GOOD_BODY | {"stream_options": {"x": 1}},
        "stream_options.x",
        "not a field",
    ),
    bad_field("stream_options", {"include_usage": 1}, 'stream_options is {"include_usage":1}'),
    BadRequestCase("id overflows", b'{"prompt": [1e999]}', "prompt", "out of range"),
    bad_field("n", True, "n is true"),
    bad_field("n", -1, "n is -1: it must be 1 to 16"),
    bad_field("best_of", 3, "best_of is 3: not available, it must be null or n (1)"),
    bad_field("echo", 0, "echo is 0"),
    bad_field("logprobs", True, "logprobs is true"),
    bad_field("logprobs", -1, "logprobs is -1: it must be 0 to 20"),
    bad_field("prompt_logprobs", -1, "prompt_logprobs is -1: it must be 0 to 20"),
    bad_field("prompt_logprobs", 21, "prompt_logprobs is 21: it must be 0 to 20"),
    BadRequestCase(
        "prompt logprobs of a stream",
        GOOD_BODY | {"prompt_logprobs": 0, "stream": True},
        "prompt_logprobs",
        "prompt_logprobs is 0: not available with stream",
    ),
    bad_field("first_choice", -1, "first_choice is -1"),
    bad_field("logit_bias", {"five": 1}, "logit_bias has the key 'five': keys are token ids"),
    bad_field("logit_bias", {"-5": 1}, "logit_bias has the key '-5'"),
    bad_field("logit_bias", {"5": 1, "05": 1}, "logit_bias has token id 5 twice"),
    bad_field("logit_bias", {"5": "1"}, "logit_bias is"),
    bad_field("stop", [5], "stop is [5]"),
    bad_field("suffix", "", "suffix is"),
    bad_field("priority", "high", "priority is"),
]


# What only protobuf can say: JSON has no such numbers.
BAD_ON_GRPC = [
    BadRequestCase(
        "temperature NaN",
        GOOD_BODY | {"temperature": float("nan")},
        "temperature",
        "temperature is nan",
    ),
    BadRequestCase(
        "temperature infinite",
        GOOD_BODY | {"temperature": float("inf")},
        "temperature",
        "temperature is inf",
    ),
    BadRequestCase("top_p NaN", GOOD_BODY | {"top_p": float("nan")}, "top_p", "top_p is nan"),
]
