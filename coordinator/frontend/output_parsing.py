"""Chooses how the text of a conversation's output is parsed: reasoning, tool calls, content."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.errors import InvalidRequest
from coordinator.frontend.tool_use import ToolUse
from coordinator.text.output_parsers.deltas import OutputParser
from coordinator.text.output_parsers.forced_calls import NamedCallParser, RequiredCallsParser
from coordinator.text.output_parsers.reasoning import ReasoningParser
from coordinator.text.output_parsers.selection import (
    AUTO,
    REASONING_TAGS,
    ToolCallFormat,
    choose_reasoning_style,
    choose_tool_call_format,
    starts_inside_reasoning,
)
from coordinator.text.tokenizer import Tokenizer

# Tokens at the end of a prompt in which a template may have opened or closed the reasoning.
_PROMPT_END_TOKENS = 32


@dataclass(frozen=True, slots=True)
class OutputParsing:
    """How the output of one request is parsed."""

    # Makes the parser of one choice, after the prompt of these tokens.
    create_parser: Callable[[Sequence[int]], OutputParser]
    shown_special: frozenset[str] = frozenset()  # special tokens that are text for the parser
    is_parallel: bool = True  # whether calls after the first are shown
    has_short_call_ids: bool = False  # as the chat templates of Mistral demand


@dataclass(frozen=True, slots=True)
class OutputParserSettings:
    """The settings --tool-call-parser and --reasoning-parser."""

    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO

    def choose_parsing(
        self,
        tokenizer: Tokenizer,
        tool_use: ToolUse | None,
        *,
        separates_reasoning: bool = True,
        has_fixed_form: bool = False,
    ) -> OutputParsing | None:
        """Return None if all of the output is content.

        An output with a fixed form has neither reasoning nor calls, unless it is one. Raises
        InvalidRequest for tools whose calls could not be found in the output.
        """
        template = tokenizer.chat_template_source
        tool_calls = choose_tool_call_format(self.tool_call_parser, template)
        has_short_ids = tool_calls is not None and tool_calls.has_short_ids
        if tool_use is not None and tool_use.is_forced:
            # Its output is constrained to be a call from the first token on.
            create = _forced_parser_factory(tool_use)
            return OutputParsing(lambda _: create(), has_short_call_ids=has_short_ids)
        if has_fixed_form:
            return None
        if tool_use is not None and tool_calls is None:
            raise InvalidRequest(
                "tools is given with tool_choice auto, but how this model writes tool calls is not "
                "known: set --tool-call-parser, or send tool_choice none, required or a function",
                param="tools",
            )
        style = (
            choose_reasoning_style(self.reasoning_parser, template) if separates_reasoning else None
        )
        if tool_use is None:
            tool_calls = None
        if tool_calls is None and style is None:
            return None
        return OutputParsing(
            partial(_create_parser, tokenizer, tool_calls, style),
            (tool_calls.tags if tool_calls else frozenset())
            | (REASONING_TAGS if style else frozenset()),
            is_parallel=tool_use is None or tool_use.is_parallel,
            has_short_call_ids=has_short_ids,
        )


def _forced_parser_factory(tool_use: ToolUse) -> Callable[[], OutputParser]:
    if tool_use.choice == "named":
        return partial(NamedCallParser, tool_use.function_name)
    return RequiredCallsParser


def _create_parser(
    tokenizer: Tokenizer,
    tool_calls: ToolCallFormat | None,
    reasoning_style: str | None,
    prompt: Sequence[int],
) -> OutputParser:
    call_parser = tool_calls.create_parser() if tool_calls else None
    if reasoning_style is None:
        assert call_parser is not None
        return call_parser
    prompt_end = "".join(map(tokenizer.token_text, prompt[-_PROMPT_END_TOKENS:]))
    return ReasoningParser(
        starts_inside=starts_inside_reasoning(reasoning_style, prompt_end),
        answer_parser=call_parser,
    )
