"""Answers of the HTTP API as outputs of the Python API."""

from typing import Any

from offline.answers import parse_chat, parse_completion
from offline.sampling_params import SamplingParams

CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def answer_with(message: dict[str, Any], finish_reason: str) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", **message},
        "logprobs": None,
        "finish_reason": finish_reason,
        "token_ids": [4, 5],
    }
    usage = {"prompt_tokens_details": None}
    return {"id": "chatcmpl-1", "choices": [choice], "usage": usage, "prompt_token_ids": [1]}


def test_calls_of_tools_and_reasoning_are_kept_beside_the_text() -> None:
    message = {"content": None, "reasoning": "add them", "tool_calls": [CALL]}
    (output,) = parse_chat(answer_with(message, "tool_calls")).outputs
    assert (output.text, output.reasoning, output.tool_calls) == ("", "add them", [CALL])
    assert (output.finish_reason, output.token_ids) == ("tool_calls", [4, 5])


def test_a_plain_answer_has_neither() -> None:
    (output,) = parse_chat(answer_with({"content": "two"}, "stop")).outputs
    assert (output.text, output.reasoning, output.tool_calls) == ("two", None, [])


def test_logprobs_are_of_the_output_also_if_the_prompt_is_echoed() -> None:
    logprobs = {
        "token_ids": [1, 2, 4],
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -0.5, -0.25],
        "top_tokens": [None, [], [{"token_id": 4, "token": "c", "logprob": -0.25}]],
    }
    choice = {"index": 0, "text": "abc", "logprobs": logprobs, "finish_reason": "length"}
    answer = {
        "id": "cmpl-1",
        "choices": [{**choice, "token_ids": [4], "prompt_token_ids": [1, 2]}],
        "usage": {"prompt_tokens_details": None},
    }
    params = SamplingParams(logprobs=1, extra_body={"echo": True})
    (output,) = parse_completion(answer, "ab", params).outputs
    assert output.logprobs is not None
    assert [list(position) for position in output.logprobs] == [[4]]
    assert output.cumulative_logprob == -0.25
