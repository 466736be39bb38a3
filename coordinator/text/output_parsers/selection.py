"""Chooses the parsers of a model's output, by name or by the model's chat template."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.text.output_parsers import hermes, llama3_json, mistral, reasoning
from coordinator.text.output_parsers.deltas import OutputParser
from coordinator.text.output_parsers.hermes import HermesParser
from coordinator.text.output_parsers.llama3_json import Llama3JsonParser
from coordinator.text.output_parsers.mistral import MistralParser

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a family of models writes tool calls."""

    name: str
    create_parser: Callable[[], OutputParser]
    tags: frozenset[str]  # texts that may be special tokens of the vocabulary
    has_short_ids: bool = False  # whether the chat template wants ids of nine letters and digits


TOOL_CALL_FORMATS = {
    each.name: each
    for each in (
        ToolCallFormat("hermes", HermesParser, frozenset({hermes.START_TAG, hermes.END_TAG})),
        ToolCallFormat("llama3_json", Llama3JsonParser, frozenset({llama3_json.START_TAG})),
        ToolCallFormat(
            "mistral",
            MistralParser,
            frozenset({mistral.START_TAG, mistral.CALL_ID_TAG, mistral.ARGUMENTS_TAG}),
            has_short_ids=True,
        ),
    )
}
REASONING_TAGS = frozenset({reasoning.START_TAG, reasoning.END_TAG})
_USES_TOOLS = re.compile(r"\btools\b")
# Qwen3-Coder and others write XML between the tags of Hermes.
_XML_CALL = "<function="


def choose_tool_call_format(setting: str, template: str | None) -> ToolCallFormat | None:
    """Return the format of `--tool-call-parser`, or that of the template if it is `auto`."""
    if setting != AUTO:
        return TOOL_CALL_FORMATS.get(setting)
    if template is None or not _USES_TOOLS.search(template):
        return None
    if mistral.START_TAG in template:
        return TOOL_CALL_FORMATS["mistral"]
    if hermes.START_TAG in template:
        return None if _XML_CALL in template else TOOL_CALL_FORMATS["hermes"]
    if "<|start_header_id|>" in template and "parameters" in template:
        return TOOL_CALL_FORMATS["llama3_json"]
    return None


def choose_reasoning_style(setting: str, template: str | None) -> str | None:
    """Return the style of `--reasoning-parser`, or None if the model writes no reasoning.

    With `auto`, a template with both tags is one of a model that reasons if it is asked to.
    """
    if setting != AUTO:
        return None if setting == NONE else setting
    writes_reasoning = template is not None and all(tag in template for tag in REASONING_TAGS)
    return "qwen3" if writes_reasoning else None


def starts_inside_reasoning(style: str, prompt_end: str) -> bool:
    """Whether the output begins with reasoning, without a start tag.

    It does after a prompt that ends with a start tag, as some templates write it. The style
    `deepseek_r1` begins with it always, unless the prompt has closed the reasoning already.
    """
    begin = prompt_end.rfind(reasoning.START_TAG)
    end = prompt_end.rfind(reasoning.END_TAG)
    return begin > end if max(begin, end) >= 0 else style == "deepseek_r1"
