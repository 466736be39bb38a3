"""Each format of tool calls: what is a call, what stays content, and what a cut leaves."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.text.output_parsers.deltas import OutputParser
from coordinator.text.output_parsers.forced_calls import NamedCallParser, RequiredCallsParser
from coordinator.text.output_parsers.hermes import HermesParser
from coordinator.text.output_parsers.json_scanner import MAX_DEPTH
from coordinator.text.output_parsers.llama3_json import Llama3JsonParser
from coordinator.text.output_parsers.mistral import MistralParser
from coordinator.text.output_parsers.reasoning import ReasoningParser
from tests.unit.coordinator.text.output_parsers.parsed_output import (
    ParsedOutput,
    cut,
    parse_pieces,
    parse_text,
)

ARGUMENTS = '{"city": "Zürich \\"old town\\" }", "days": [1, {"x": null}], "y": -2.5e3}'
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
LLAMA_CALL = CALL.replace('"arguments"', '"parameters"')
PARSERS: dict[str, Callable[[], OutputParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "named": lambda: NamedCallParser("get_weather"),
    "required": RequiredCallsParser,
}
ONE_CALL = [("get_weather", ARGUMENTS)]
ONE_CALL_TEXTS = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>"),
    ("hermes", f"<tool_call>{CALL}"),
    ("hermes", f"\n\n<tool_call>\n{CALL}\n</tool_call>\n"),
    ("llama3_json", LLAMA_CALL),
    ("llama3_json", f"<|python_tag|>{LLAMA_CALL}"),
    ("llama3_json", f' {{"type": "function",{LLAMA_CALL[1:]}'),
    ("llama3_json", CALL),
    ("mistral", f"[TOOL_CALLS][{CALL}]"),
    ("mistral", f"[TOOL_CALLS] [ {CALL} ] "),
    ("mistral", f"[TOOL_CALLS]{CALL}"),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}"),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{ARGUMENTS}"),
    ("mistral", f"[TOOL_CALLS] get_weather{ARGUMENTS}"),
    ("named", ARGUMENTS),
    ("required", f"[{LLAMA_CALL}]"),
]
TWO_CALL_TEXTS = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"),
    ("llama3_json", f"{LLAMA_CALL}; {LLAMA_CALL}"),
    ("llama3_json", f"<|python_tag|>{LLAMA_CALL};<|python_tag|>{LLAMA_CALL}"),
    ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]"),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}\n[TOOL_CALLS]get_weather{ARGUMENTS}"),
    ("required", f"[{LLAMA_CALL},{LLAMA_CALL}]"),
]
CONTENT_TEXTS = [
    ("hermes", "plain <tool_cal text"),
    ("hermes", "<tool_call>\nno json\n</tool_call>"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call> rest'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "no object"}'),
    ("hermes", '<tool_call>{"name": "f", "name": "g"}'),
    ("hermes", '<tool_call>{"name": "\\ud800"}'),
    ("hermes", "<tool_call>" + '{"a":' * (MAX_DEPTH + 2)),
    ("hermes", " \n "),
    ("hermes", "<tool_call>"),
    ("llama3_json", '{"name": "Ann", "age": 5}'),
    ("llama3_json", '{"name": "Ann"}'),
    ("llama3_json", f"Sure: {LLAMA_CALL}"),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS] text without a call"),
    ("mistral", "[TOOL_CALLS]f[ARGS]"),
    ("mistral", "[TOOL_CALLS][5]"),
    ("mistral", "[TOOL_CALLS]" + "x" * 1000 + "{}"),
    ("mistral", "[TOOL_CALLS]a b c{}"),
    ("named", "no json"),
    ("required", '{"name": "f"}'),
]


@pytest.mark.parametrize(("name", "text"), ONE_CALL_TEXTS)
def test_text_of_one_call(name: str, text: str) -> None:
    assert parse_text(PARSERS[name], text) == ParsedOutput(calls=ONE_CALL)


@pytest.mark.parametrize(("name", "text"), TWO_CALL_TEXTS)
def test_text_of_two_calls(name: str, text: str) -> None:
    assert parse_text(PARSERS[name], text) == ParsedOutput(calls=ONE_CALL * 2)


@pytest.mark.parametrize(("name", "text"), CONTENT_TEXTS)
def test_what_is_no_call_stays_content(name: str, text: str) -> None:
    assert parse_text(PARSERS[name], text) == ParsedOutput(content=text)


@pytest.mark.parametrize(
    ("name", "call"),
    [("hermes", f"<tool_call>{CALL}</tool_call>"), ("mistral", f"[TOOL_CALLS][{CALL}]")],
)
def test_text_around_a_call_is_content(name: str, call: str) -> None:
    output = parse_text(PARSERS[name], f"Let me see.\n{call}\nThere < it {call[:5]} is.")
    assert output == ParsedOutput("Let me see.\n\nThere < it " + call[:5] + " is.", calls=ONE_CALL)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"arguments": {"x": 1}, "name": "f"}', '{"x": 1}'),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', '{"x": 1}'),
        ('{"id": 7, "name": "f", "parameters": {}, "more": [{}, "}"], "z": true }', "{}"),
    ],
)
def test_members_of_a_call_in_any_form(text: str, arguments: str) -> None:
    output = parse_text(HermesParser, f"<tool_call>{text}</tool_call>")
    assert output == ParsedOutput(calls=[("f", arguments)])


@pytest.mark.parametrize(("name", "text"), ONE_CALL_TEXTS)
def test_cut_call_has_the_arguments_that_arrived(name: str, text: str) -> None:
    """Cut anywhere, the text is content, or a call with the beginning of its arguments.

    Calls that are required are all of the output, so that none of it is content.
    """
    for end in range(len(text)):
        output = parse_text(PARSERS[name], text[:end])
        if output.calls:
            assert output.content == ""
            ((called, arguments),) = output.calls
            assert called == "get_weather"
            assert ARGUMENTS.startswith(arguments)
        else:
            assert output.content == ("" if name == "required" else text[:end])


def test_second_required_call_that_is_cut_is_no_content() -> None:
    output = parse_text(RequiredCallsParser, f'[{LLAMA_CALL},\n  {{"name": "get_wea')
    assert (len(output.calls), output.content) == (1, "")


def test_arguments_are_given_out_as_they_arrive() -> None:
    parser = HermesParser()
    parser.feed_text('<tool_call>{"name": "f", "arguments": {"x": "ab')
    assert [str(delta) for delta in parser.feed_text("cd")] == [
        "ToolCallArguments(index=0, text='cd')"
    ]


def test_call_that_breaks_after_its_beginning_is_reported_with_its_text() -> None:
    broken = '<tool_call>{"name": "f", "arguments": {"x": '
    output = parse_text(HermesParser, broken + "oops}}</tool_call>")
    assert output.broken == [broken]
    assert output.content == "oops}}</tool_call>"


def test_second_call_is_found_after_a_broken_one() -> None:
    output = parse_text(HermesParser, f'<tool_call>{{"name": <tool_call>{CALL}</tool_call>')
    assert output == ParsedOutput('<tool_call>{"name": ', calls=ONE_CALL)


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        *("<think>", "</think>", '{"name": ', '"arguments": ', '"parameters": ', '"f"', CALL),
        *("[", "]", "{", "}", ",", ";", ":", '"', "\\", "u00e4", "-1.5e", "true", "nul", " ", "\n"),
        *("f", "\x00", "é", "😀", " " * 300, '{"x": [1, 2', LLAMA_CALL, "<", "</"),
    ]
)
TEXTS = st.lists(PIECES, max_size=30).map("".join) | st.text(max_size=60)
WITH_REASONING = {
    f"{name} {inside}": (
        lambda make=make, inside=inside: ReasoningParser(starts_inside=inside, answer_parser=make())
    )
    for name, make in PARSERS.items()
    for inside in (True, False)
}


@pytest.mark.parametrize("make_parser", [*PARSERS.values(), *WITH_REASONING.values()])
@given(text=TEXTS, places=st.lists(st.integers(0, 200), max_size=12))
def test_pieces_join_to_the_whole_and_no_text_raises(
    make_parser: Callable[[], OutputParser], text: str, places: list[int]
) -> None:
    whole = parse_text(make_parser, text)
    assert parse_pieces(make_parser(), cut(text, places)) == parse_pieces(make_parser(), [text])
    unfinished = 1 + len(whole.broken)
    assert sum(not is_json_object(arguments) for _, arguments in whole.calls) <= unfinished


def is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
