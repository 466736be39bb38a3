"""Grammars that are built to take long, to take memory, or to make masks expensive."""

import json
import random
from collections.abc import Iterator
from typing import Any


def list_hostile_grammars(count: int) -> list[dict[str, Any]]:
    """Values of `structured_outputs`, no two of which are equal."""
    drawn = random.Random(7)
    return [
        grammar for _ in range(-(-count // 6)) for grammar in _draw_grammars(drawn.randrange(10**6))
    ][:count]


def _draw_grammars(seed: int) -> Iterator[dict[str, Any]]:
    names = {f"p{seed}_{number}": {"type": "string"} for number in range(200 + seed % 1500)}
    yield {"json": {"type": "object", "properties": names}}
    yield {"json": {"type": "integer", "multipleOf": 900_001 + 2 * seed}}
    nested: dict[str, Any] = {"const": seed}
    for _ in range(50):
        nested = {"anyOf": [{"type": "array", "items": nested}, {"type": "string"}]}
    yield {"json": nested}
    yield {"regex": "|".join(f"({'ab' * length}){{1,{seed % 500 + 1}}}" for length in range(1, 99))}
    yield {"regex": f"(.|\\n)*a(.|\\n){{{seed % 400}}}b{{1,1000}}"}
    rules = "\n".join(f'r{number}: r{number + 1} | "a{seed}"' for number in range(2500))
    yield {"grammar": f'start: r0\n{rules}\nr2500: "b"'}


def encode_grammar_bodies(count: int) -> list[bytes]:
    """Requests for outputs under these grammars."""
    return [
        json.dumps({"prompt": "a", "max_tokens": 4, "structured_outputs": grammar}).encode()
        for grammar in list_hostile_grammars(count)
    ]
