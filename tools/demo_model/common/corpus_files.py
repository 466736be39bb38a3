"""The corpus on disk: one compressed file of token ids per part, and facts about its origin."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.uint16]

FACTS_FILE = "facts.json"
# Share of the training rows that comes from each part.
PART_SHARES: Mapping[str, float] = {
    "library": 0.26,
    "definitions": 0.24,
    "tests": 0.28,
    "prose": 0.04,
    "chat": 0.18,
}
HELD_OUT_PARTS = ("library", "tests", "chat")  # parts with a held-out half


@dataclass(frozen=True, slots=True)
class CorpusFacts:
    """What the model card says about the data; counts are by part."""

    python: str
    vocabulary: int
    files: dict[str, int] = field(default_factory=dict)
    documents: dict[str, int] = field(default_factory=dict)
    utf8_bytes: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)


def save_tokens(folder: Path, name: str, tokens: TokenArray) -> None:
    np.savez_compressed(folder / f"{name}.npz", tokens=tokens)


def load_tokens(folder: Path, name: str) -> TokenArray:
    with np.load(folder / f"{name}.npz", allow_pickle=False) as stored:
        tokens: TokenArray = stored["tokens"]
    return tokens


def save_facts(folder: Path, facts: CorpusFacts) -> None:
    (folder / FACTS_FILE).write_text(json.dumps(asdict(facts), indent=2) + "\n")


def load_facts(folder: Path) -> CorpusFacts:
    return CorpusFacts(**json.loads((folder / FACTS_FILE).read_text()))
