"""Compiles grammars with llguidance, with limits of our own.

The coordinator compiles a grammar once in a process that it can kill, before it admits a request;
nodes then compile the same text on a thread. llguidance releases Python's lock while it compiles
and computes masks, but not while it reads a tokenizer.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from baton.errors import ConfigError, InvalidRequest
from baton.types import GrammarKind, StructuredOutput

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Between values, JSON has one space, or a line break and indentation: some models would write
# spaces without end.
_JSON_DEFAULTS: "JsonCompileOptions" = {"whitespace_pattern": r"\x20|\r?\n[\x20\t]{0,40}"}
_GBNF_RULE = re.compile(r"(?m)^\s*[\w-]+\s*::=")  # Lark writes a colon
JSON_OPTIONS_KEY = "x-guidance"  # of a schema: options of llguidance, which only Baton sets

# What one compilation or one mask may take. Times are those of a core of 3 GHz.
PARSER_LIMITS = LLParserLimits(
    max_items_in_row=2000,  # alternatives of the parser after one lexeme
    initial_lexer_fuel=500_000,  # about 10 ms
    step_lexer_fuel=100_000,  # of one mask, about 7 ms
    step_max_items=20_000,  # of one mask, about 1 ms
    max_lexer_states=10_000,  # about 2 KiB each
    max_grammar_size=100_000,  # symbols of all rules
    verbose_errors=False,  # the verbose ones quote the output
)


_MAX_ERROR_CHARS = 500


class GrammarError(InvalidRequest):
    """The grammar is malformed, cannot be satisfied, or is beyond a limit."""


def load_grammar_tokenizer(
    file: Path, vocab_size: int = 0, eos_token_ids: Sequence[int] = ()
) -> LLTokenizer:
    """Read a model's tokenizer.json for llguidance. Takes half a second for 128000 tokens.

    `vocab_size` is that of the model, whose logits may have more entries than the tokenizer.
    Without `eos_token_ids` it is the tokenizer's own. Holds Python's lock. Raises ConfigError.
    """
    end_tokens = list(eos_token_ids) or None
    try:
        text = file.read_text()
        try:
            return LLTokenizer(text, n_vocab=vocab_size or None, eos_token=end_tokens)
        except ValueError:  # few models have a tokenizer with more tokens than they have logits
            return LLTokenizer(text, eos_token=end_tokens)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read for structured output ({error})") from None


def compile_grammar(tokenizer: LLTokenizer, grammar: StructuredOutput) -> LLMatcher:
    """Compile a grammar; the matcher is in its initial state. Raises GrammarError."""
    try:
        source = build_grammar(grammar)
    except ValueError as error:  # of llguidance: a schema that is nested too deeply
        raise GrammarError(f"structured_output: {error}") from None
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=PARSER_LIMITS)
    if matcher.is_error():
        raise GrammarError(f"structured_output: {describe_matcher_error(matcher)}")
    return matcher


def describe_matcher_error(matcher: LLMatcher) -> str:
    """Return the error of a matcher without what llguidance adds for its developers."""
    error = matcher.get_error().replace("<non-verbose/>", "").strip()
    if error.startswith("NoExtension"):
        return "no text satisfies the grammar"
    return error[:_MAX_ERROR_CHARS]


def build_grammar(grammar: StructuredOutput) -> str:
    """Return the grammar in llguidance's own form. Raises GrammarError if it is malformed."""
    match grammar.kind:
        case GrammarKind.JSON:
            return _json_schema_grammar(grammar.text)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            choices = _decode_choices(grammar.text)
            texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            # One terminal: the parser's items, which a rule has for each text, are bounded.
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        case GrammarKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(to_lark(grammar.text))
        case GrammarKind.STRUCTURAL_TAG:
            return _structural_tag_grammar(grammar.text)


def to_lark(text: str) -> str:
    """Convert a grammar in GBNF to Lark; one in Lark is returned. Raises GrammarError."""
    if not _GBNF_RULE.search(text):
        return text
    try:
        return gbnf_to_lark(text)
    except (GbnfToLarkError, RecursionError) as error:
        raise GrammarError(f"structured_output: the grammar is not GBNF: {error}") from None


def _json_schema_grammar(text: str) -> str:
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"structured_output: the schema is not JSON: {error}") from None
    if isinstance(schema, bool):
        return LLMatcher.grammar_from_json_schema(text)
    if not isinstance(schema, dict):
        raise GrammarError("structured_output: the schema must be an object or a boolean")
    defaults = None if JSON_OPTIONS_KEY in schema else _JSON_DEFAULTS
    return LLMatcher.grammar_from_json_schema(text, defaults=defaults)


def _decode_choices(text: str) -> list[str]:
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise GrammarError(f"structured_output: choice must be texts: {error}") from None
    if not choices:
        raise GrammarError("structured_output: choice is empty: it needs at least one text")
    return choices


class TaggedStructure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One structural tag: what begins it, the schema of what is in it, and what ends it."""

    begin: str
    end: str
    schema: dict[str, object] | bool = True


class StructuralTags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tags of a text, and the texts after which one must follow."""

    structures: list[TaggedStructure]
    triggers: list[str]
    type: str = "structural_tag"


def _structural_tag_grammar(text: str) -> str:
    try:
        tags = msgspec.json.decode(text, type=StructuralTags)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"structured_output: structural_tag: {error}") from None
    if not tags.structures:
        raise GrammarError("structured_output: structural_tag has no structures")
    found = []
    for index, structure in enumerate(tags.structures):
        triggers = [one for one in tags.triggers if one and structure.begin.startswith(one)]
        if not triggers:
            raise GrammarError(
                f"structured_output: structural_tag.structures[{index}].begin starts with none of "
                "the triggers"
            )
        schema = {} if structure.schema is True else structure.schema
        if schema is False:
            raise GrammarError(
                f"structured_output: structural_tag.structures[{index}].schema allows nothing"
            )
        found.append(
            StructTag(
                trigger=triggers[0],
                begin=structure.begin,
                grammar=dict(_JSON_OPTIONS | schema),
                end=structure.end,
            )
        )
    # Triggers are matched as text, so that they need not be special tokens of the model.
    return StructTag.to_grammar(found, assume_special=False)


_JSON_OPTIONS = {JSON_OPTIONS_KEY: _JSON_DEFAULTS}
