"""Schemas of the JSON Schema Test Suite, and whether an output obeys one."""

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from llguidance import LLTokenizer

from baton.structured_output.grammar_compiler import compile_grammar, load_grammar_tokenizer
from baton.types import GrammarKind, StructuredOutput

_FILE = Path(__file__).parents[1] / "data" / "json-schema-test-suite" / "schemas.jsonl"


@dataclass(frozen=True)
class PublicSchema:
    """One schema of the suite."""

    name: str  # its file and description
    schema: dict[str, Any] | bool

    @property
    def is_readable(self) -> bool:
        """Whether Python's regular expressions, which the validator uses, know its patterns."""
        return "\\p{" not in str(self.schema) and "\\\\p{" not in json.dumps(self.schema)


def draw_schemas(seed: int) -> list[PublicSchema]:
    """All schemas that the validator can read, in an order drawn from `seed`."""
    cases = [json.loads(line) for line in _FILE.read_text().splitlines()]
    schemas = [
        PublicSchema(f"{case['file']}: {case['description']}", case["schema"]) for case in cases
    ]
    drawn = [schema for schema in schemas if schema.is_readable]
    random.Random(seed).shuffle(drawn)
    return drawn


def check_complete_output(schema: PublicSchema, text: str) -> None:
    """Raise an error unless the text is JSON that the schema allows."""
    jsonschema.Draft202012Validator(schema.schema).validate(json.loads(text))


@cache
def load_tokenizer(file: Path) -> LLTokenizer:
    return load_grammar_tokenizer(file, 512, (0,))


def is_prefix(schema: PublicSchema, tokenizer: LLTokenizer, tokens: list[int]) -> bool:
    """Whether the tokens begin an output that the schema allows."""
    grammar = StructuredOutput(GrammarKind.JSON, json.dumps(schema.schema))
    return compile_grammar(tokenizer, grammar).try_consume_tokens(tokens) == len(tokens)


def closing_biases(file: Path, bias: float) -> dict[str, float]:
    """Biases of the tokens that end strings, arrays, objects and the output."""
    vocabulary: dict[str, int] = json.loads(file.read_text())["model"]["vocab"]
    ends = [token for text, token in vocabulary.items() if text and set(text) <= set('"}]')]
    return {str(token): bias for token in (0, *ends)}
