"""Tools and reasoning in the Python API: an engine in the process answers as a cluster does."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from offline.llm import LLM
from offline.outputs import CompletionOutput
from offline.sampling_params import SamplingParams
from tests.clients.scripted_model import build_scripted_model
from tests.cluster import Cluster

SCRIPTS = {
    "call": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "thought": "I add one and two.</think>It is three.",
    "named": '{"a": 2}',
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "add"}}}
# Of a model that begins with its reasoning, without a sign of that in its chat template.
PARSERS: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}


def ask(script: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"SCRIPT-{script}"}]


def ask_everything(llm: LLM) -> list[CompletionOutput]:
    params = SamplingParams(temperature=0, max_tokens=64)
    without_reasoning = replace(params, extra_body={"separate_reasoning": False})
    forced = replace(params, extra_body=NAMED)
    outputs = [
        *llm.chat(ask("call"), without_reasoning, tools=[TOOL]),
        *llm.chat(ask("thought"), params),
        *llm.chat(ask("named"), forced, tools=[TOOL]),
        *llm.chat(
            [*ask("thought"), {"role": "assistant", "content": "So"}],
            params,
            add_generation_prompt=False,
            continue_final_message=True,
        ),
    ]
    return [output.outputs[0] for output in outputs]


async def test_tools_and_reasoning_are_parsed_in_the_process_as_by_a_cluster(
    tmp_path: Path,
) -> None:
    model = tmp_path / "scripted"
    build_scripted_model(model, SCRIPTS)
    own: dict[str, Any] = {"dtype": "float32", "threads": "1", "device": "cpu"}
    async with Cluster(tmp_path, model=str(model), **own, **PARSERS) as one:
        with LLM(one.http_url) as remote:
            served = await asyncio.to_thread(ask_everything, remote)
    with LLM(str(model), segment_dir=str(tmp_path), kv_memory="8MiB", **own, **PARSERS) as llm:
        local = await asyncio.to_thread(ask_everything, llm)
    for output in (*served, *local):
        for each in output.tool_calls:
            assert each.pop("id")
    assert local == served
    call, thought, named, continued = local
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert call.tool_calls == [{"type": "function", "function": function}]
    assert (call.text, call.finish_reason) == ("", "tool_calls")
    assert (thought.reasoning, thought.text) == ("I add one and two.", "It is three.")
    assert named.tool_calls == [
        {"type": "function", "function": function | {"arguments": '{"a": 2}'}}
    ]
    assert continued.token_ids
