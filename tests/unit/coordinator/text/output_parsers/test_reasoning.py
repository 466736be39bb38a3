"""Reasoning is told from the answer, by its tags and by how the prompt ends."""

from functools import partial

import pytest

from coordinator.text.output_parsers.hermes import HermesParser
from coordinator.text.output_parsers.reasoning import MAX_DROPPED_SPACE, ReasoningParser
from coordinator.text.output_parsers.selection import (
    choose_reasoning_style,
    choose_tool_call_format,
    starts_inside_reasoning,
)
from tests.unit.coordinator.text.output_parsers.parsed_output import ParsedOutput, parse_text

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("<think>\na b\n</think>\n\nc", ("a b", "c"), ("a b", "c")),
        (" \n<think>a</think>c", ("a", "c"), ("a", "c")),
        ("a\n\n</think>\n\nc", ("a", "c"), ("", "a\n\n</think>\n\nc")),
        ("a", ("a", ""), ("", "a")),
        ("<think>a</thin", ("a</thin", ""), ("a</thin", "")),
        ("<thin", ("<thin", ""), ("", "<thin")),
        ("<think>a</think>c</think>", ("a", "c</think>"), ("a", "c</think>")),
        ("c <think>a</think>", ("c <think>a", ""), ("", "c <think>a</think>")),
        ("", ("", ""), ("", "")),
    ],
)  # fmt: skip
def test_reasoning_and_answer(text: str, inside: tuple[str, str], outside: tuple[str, str]) -> None:
    for starts_inside, (reasoning, content) in ((True, inside), (False, outside)):
        told = parse_text(partial(ReasoningParser, starts_inside=starts_inside), text)
        assert told == ParsedOutput(content, reasoning), starts_inside


def test_much_whitespace_is_not_dropped() -> None:
    space = " " * (3 * MAX_DROPPED_SPACE)
    told = parse_text(lambda: ReasoningParser(starts_inside=True), f"a{space}</think>b")
    assert told == ParsedOutput("b", "a" + space[MAX_DROPPED_SPACE:])


def test_calls_are_searched_in_the_answer_alone() -> None:
    told = parse_text(
        lambda: ReasoningParser(starts_inside=False, answer_parser=HermesParser()),
        f"<think>{CALL}</think>{CALL}",
    )
    assert told == ParsedOutput(reasoning=CALL, calls=[("f", "{}")])


@pytest.mark.parametrize(
    ("prompt_end", "qwen3", "deepseek_r1"),
    [
        ("<|im_start|>assistant\n", False, True),
        ("<|Assistant|><think>\n", True, True),
        ("assistant\n<think>\n\n</think>\n\n", False, False),
        ("<think>a</think>b<|Assistant|><think>\n", True, True),
    ],
)
def test_prompt_says_whether_the_output_begins_with_reasoning(
    prompt_end: str, qwen3: bool, deepseek_r1: bool
) -> None:
    assert starts_inside_reasoning("qwen3", prompt_end) == qwen3
    assert starts_inside_reasoning("deepseek_r1", prompt_end) == deepseek_r1


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}{{ '<tool_call>' }}{% endif %}", "hermes"),
        ("{% if tools %}{{ '<tool_call><function=x>' }}{% endif %}", None),
        ("{{ tools }}[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ('{{ tools }}<|start_header_id|>{"name": x, "parameters": y}<|python_tag|>', "llama3_json"),
        ("{{ messages }}<tool_call>", None),
        ("{{ tools }}", None),
        (None, None),
    ],
)
def test_format_of_calls_is_that_of_the_template(
    template: str | None, expected: str | None
) -> None:
    chosen = choose_tool_call_format("auto", template)
    assert (chosen.name if chosen else None) == expected
    assert choose_tool_call_format("none", template) is None
    named = choose_tool_call_format("mistral", template)
    assert named is not None
    assert named.name == "mistral"


def test_reasoning_style_is_that_of_the_template() -> None:
    both = "{{ messages }}<think></think>"
    assert choose_reasoning_style("auto", both) == "qwen3"
    assert choose_reasoning_style("auto", "<think>") is None
    assert choose_reasoning_style("auto", None) is None
    assert choose_reasoning_style("none", both) is None
    assert choose_reasoning_style("deepseek_r1", None) == "deepseek_r1"
