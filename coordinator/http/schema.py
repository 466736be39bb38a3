"""The wire format of /v1/completions: strict types in, OpenAI's shapes out.

A field of OpenAI's, or of the documented extensions, that is not served is accepted when null or at its no-op
default; anything else is refused by name, never ignored.
"""

import re
from typing import Any

import msgspec

from baton.errors import InvalidRequest
from coordinator.ask import Ask

_PATH = re.compile(r" - at `\$\.(?P<field>\w+)(?P<rest>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*?)`(?: - at `\$\.(?P<parent>\w+)`)?$", re.DOTALL)

# What each field may say while it is not served, beside null.
NO_OPS: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "stop": ([],),
    "suffix": (),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "priority": (0,),
}


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


class CompletionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[int] | None = None
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    n: Any = None
    best_of: Any = None
    echo: Any = None
    logprobs: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    stop: Any = None
    suffix: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    priority: Any = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def to_ask(self, timeout: float | None, client_id: str | None) -> Ask:
        return Ask(
            prompt=self.prompt,
            model=self.model,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids or (),
            timeout=timeout,
            client_id=client_id,
        )


class Choice(msgspec.Struct):
    index: int
    text: str
    logprobs: None
    finish_reason: str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Completion(msgspec.Struct):
    """A whole answer, or one chunk of a stream (there `usage` is unset, or null until the last chunk)."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


_decoder = msgspec.json.Decoder(CompletionRequest)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode(body: bytes) -> CompletionRequest:
    """Raises InvalidRequest naming the field and what is wrong with it."""
    try:
        request = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error), body) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    _check_no_ops(request)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is given, but stream is not true", param="stream_options")
    return request


def _check_no_ops(request: CompletionRequest) -> None:
    for field, accepted in NO_OPS.items():
        value = getattr(request, field)
        if value is None or any(type(value) in _alike(no_op) and value == no_op for no_op in accepted):
            continue
        allowed = " or ".join(["null", *(msgspec.json.encode(no_op).decode() for no_op in accepted)])
        shown = _cut(msgspec.json.encode(value).decode())
        raise InvalidRequest(f"{field} is {shown}: not available yet, it must be {allowed}", param=field)


def _alike(no_op: object) -> tuple[type, ...]:
    """JSON has one number type, and a bool is not a number."""
    return (int, float) if type(no_op) is int else (type(no_op),)


def _explain(reason: str, body: bytes) -> InvalidRequest:
    unknown = _UNKNOWN.match(reason)
    if unknown:
        field = ".".join(filter(None, (unknown["parent"], unknown["field"])))[:64]
        return InvalidRequest(f"{field} is not a field of this request", param=field)
    at = _PATH.search(reason)
    if at is None:
        return InvalidRequest(f"the body must be a JSON object: {reason}")
    field, rest, expected = at["field"], at["rest"], reason[: at.start()]
    try:
        worded = _fields.decode(body)[field]
    except RecursionError:  # only this pass looks inside a value of the wrong type
        return InvalidRequest(f"{field} is nested too deeply: {expected}", param=field)
    if field == "prompt":
        return _explain_prompt(worded, rest, expected)
    return InvalidRequest(f"{field} is {_cut(bytes(worded).decode())}: {expected}{rest and f' at {rest}'}", param=field)


def _explain_prompt(worded: msgspec.Raw, rest: str, expected: str) -> InvalidRequest:
    """The message leaves the prompt itself out."""
    try:
        prompt = msgspec.json.decode(worded)
    except (msgspec.DecodeError, RecursionError):  # such as a number out of range
        prompt = None
    if isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt):
        return InvalidRequest(
            "prompt is a list of prompts: not available yet, send one request for each", param="prompt"
        )
    return InvalidRequest(f"prompt{rest} is of the wrong type: {expected}", param="prompt")


def _cut(text: str) -> str:
    return text if len(text) <= 64 else text[:61] + "..."


def json_schema() -> dict[str, Any]:
    """Of the request body, for OpenAPI, with nothing to look up elsewhere."""
    _, parts = msgspec.json.schema_components([CompletionRequest], ref_template="{name}")
    schema: dict[str, Any] = parts["CompletionRequest"]
    options = schema["properties"]["stream_options"]
    options["anyOf"] = [parts[kind["$ref"]] if "$ref" in kind else kind for kind in options["anyOf"]]
    return schema
