"""Answers of the HTTP API as outputs of the Python API."""

from typing import Any

from offline.answers import parse_chat

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
