"""Where rounds are played: clusters, what their clients ask for, and what is right.

wide    two prefill and two decode nodes, one hand-off in two over shared memory, the rest over TCP
tight   one prefill node, prompts that fill the decode nodes' caches: refusals, evictions, preemption. One of them is
        reached over gRPC
model   a small real model instead of the paced engine
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node_engine.paced import paced_reference, paced_scores
from tests.chaos.rounds import LONGEST_OUTPUT, Load
from tests.models import VOCAB, build_model, clear_prompts, load_reference

_PACED_VOCAB = 32000
_SHARES = {"wide": 6, "tight": 2, "model": 2}  # of ten rounds
_FAMILIES = 4  # of prompts that begin alike


@dataclass(frozen=True, slots=True)
class Stage:
    """`settings` are those of LinkedCluster."""

    load: Load
    settings: dict[str, Any] = field(default_factory=dict)


def stage_of(number: int, rounds: int) -> str:
    """The stage of round `number` of `rounds`: each stage has its share, and all of its rounds in a row."""
    bound = 0.0
    for name, share in _SHARES.items():
        bound += share * rounds / sum(_SHARES.values())
        if number + 0.5 < bound:
            return name
    return name


def build(name: str, folder: Path) -> Stage:
    """`folder` keeps what takes long to make."""
    return _STAGES[name](folder)


def names() -> Sequence[str]:
    return tuple(_STAGES)


def _wide(_: Path) -> Stage:
    lengths = (1, 2, 15, 16, 17, 31, 33, 64, 100, 130, 200, 257, 300)  # around block and chunk boundaries
    settings = {"prefill": 2, "decode": 2, "per_node": _ELSEWHERE}
    return Stage(Load(6, _random_prompts(lengths, _PACED_VOCAB), paced_reference, paced_scores), settings)


def _tight(_: Path) -> Stage:
    lengths = (16, 33, 300, 511, 512, 640, 800, 960)
    settings = {"prefill": 1, "decode": 2, "per_node": _BY_GRPC, "paced_prefill_us_per_token": 60.0}
    return Stage(Load(14, _random_prompts(lengths, _PACED_VOCAB), paced_reference, paced_scores), settings)


def _model(folder: Path) -> Stage:
    """Greedy outputs of the reference cost as much as the cluster's own: the prompts come from a table."""
    model = build_model("llama", folder)
    loaded = load_reference(model)
    shared = [random.Random(0).randrange(VOCAB) for _ in range(130)]
    fresh = clear_prompts(loaded, (1, 16, 33, 100, 257), LONGEST_OUTPUT)
    alike = clear_prompts(loaded, (131, 160, 200), LONGEST_OUTPUT, seed=1, shared_prefix=shared)
    answers = {entry.prompt: entry.answer for entry in (*fresh, *alike)}
    settings = {
        "prefill": 1,
        "decode": 2,
        "per_node": _ELSEWHERE,
        "engine": "model",
        "model": str(model),
        "dtype": "float32",
        "threads": "1",
        "other_model": {"model": str(build_model("llama", folder, seed=1))},
    }
    return Stage(
        Load(4, lambda rng: rng.choice(tuple(answers)), lambda prompt, n: answers[tuple(prompt)][:n]),
        settings,
    )


def _random_prompts(lengths: Sequence[int], vocab_size: int) -> Callable[[random.Random], tuple[int, ...]]:
    """Half of them begin like others."""

    def draw(rng: random.Random) -> tuple[int, ...]:
        family = random.Random(rng.randrange(_FAMILIES))
        length = rng.choice(lengths)
        shared = rng.randrange(length + 1) if rng.random() < 0.5 else 0
        return tuple((family if i < shared else rng).randrange(vocab_size) for i in range(length))

    return draw


_ELSEWHERE = {"decode-1": {"host_id": "elsewhere"}}  # so that its hand-offs go over TCP
_BY_GRPC = {"decode-1": {"transport": "grpc"}}
_STAGES: dict[str, Callable[[Path], Stage]] = {"wide": _wide, "tight": _tight, "model": _model}
