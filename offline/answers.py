"""Answers of the HTTP API as `RequestOutput`s."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from offline.outputs import CompletionOutput, Logprob, LogprobsAtPosition, RequestOutput
from offline.sampling_params import SamplingParams


def parse_completion(
    answer: Mapping[str, Any], prompt_text: str | None, params: SamplingParams
) -> RequestOutput:
    """Convert an answer of /v1/completions."""
    outputs = []
    for choice in answer["choices"]:
        logprobs = None
        if params.logprobs is not None:
            logprobs = list(_completion_positions(choice["logprobs"], len(choice["token_ids"])))
        outputs.append(_build_output(choice, choice["text"], logprobs))
    first = answer["choices"][0]
    return _build_request_output(answer, prompt_text, first, outputs)


def parse_chat(answer: Mapping[str, Any]) -> RequestOutput:
    """Convert an answer of /v1/chat/completions."""
    outputs = []
    for choice in answer["choices"]:
        scores = choice["logprobs"]
        logprobs = None
        if scores is not None:
            logprobs = [_chat_position(each) for each in scores["content"] or ()]
        message = choice["message"]
        output = _build_output(choice, message["content"] or "", logprobs)
        output.tool_calls = message.get("tool_calls") or []
        output.reasoning = message.get("reasoning")
        outputs.append(output)
    return _build_request_output(answer, None, answer, outputs)


def _completion_positions(
    logprobs: Mapping[str, Any], num_output_tokens: int
) -> Iterator[LogprobsAtPosition]:
    """Yield the positions of the output. Those of an echoed prompt come before them."""
    lists = [logprobs[name] for name in ("token_ids", "tokens", "token_logprobs", "top_tokens")]
    positions = list(zip(*lists, strict=True))
    for token, text, logprob, top in positions[len(positions) - num_output_tokens :]:
        yield _build_position(token, text, logprob, top)


def _chat_position(entry: Mapping[str, Any]) -> LogprobsAtPosition:
    return _build_position(
        entry["token_id"], entry["token"], entry["logprob"], entry["top_logprobs"]
    )


def _build_position(
    token: int, text: str, logprob: float, likeliest: Sequence[Mapping[str, Any]]
) -> LogprobsAtPosition:
    """`likeliest` are objects with token_id, token and logprob, best first."""
    position = {token: Logprob(logprob, None, text)}
    for rank, other in enumerate(likeliest, 1):
        position[other["token_id"]] = Logprob(other["logprob"], rank, other["token"])
    return position


def _parse_prompt_position(entry: Mapping[str, Any] | None) -> LogprobsAtPosition | None:
    if entry is None:
        return None
    return {
        int(token): Logprob(score["logprob"], score["rank"], score["decoded_token"])
        for token, score in entry.items()
    }


def _build_output(
    choice: Mapping[str, Any], text: str, logprobs: list[LogprobsAtPosition] | None
) -> CompletionOutput:
    tokens = choice["token_ids"]
    total = None
    if logprobs is not None:
        total = sum(
            position[token].logprob for token, position in zip(tokens, logprobs, strict=True)
        )
    return CompletionOutput(
        index=choice["index"],
        text=text,
        token_ids=tokens,
        cumulative_logprob=total,
        logprobs=logprobs,
        finish_reason=choice["finish_reason"],
        stop_reason=choice.get("stop_reason"),
    )


def _build_request_output(
    answer: Mapping[str, Any],
    prompt: str | None,
    prompt_fields: Mapping[str, Any],
    outputs: list[CompletionOutput],
) -> RequestOutput:
    """`prompt_fields` is the part of the answer that has the tokens of the prompt."""
    prompt_logprobs = prompt_fields.get("prompt_logprobs")
    details = answer["usage"]["prompt_tokens_details"] or {}
    return RequestOutput(
        request_id=answer["id"],
        prompt=prompt,
        prompt_token_ids=prompt_fields["prompt_token_ids"],
        prompt_logprobs=(
            None
            if prompt_logprobs is None
            else [_parse_prompt_position(each) for each in prompt_logprobs]
        ),
        outputs=outputs,
        finished=True,
        num_cached_tokens=details.get("cached_tokens"),
    )
