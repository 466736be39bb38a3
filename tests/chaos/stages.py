"""Stages of chaos rounds: clusters, the calls of their clients, and the right answers.

wide    two prefill and two decode nodes; half of the KV transfers use shared memory, half TCP
tight   one prefill node and prompts that fill the decode nodes' caches: refusals, evictions,
        preemption; KV transfers to one of the decode nodes use gRPC
device  as wide, over cuda_ipc with host memory in place of a GPU's; half of the KV transfers read
        that memory and use TCP
gpu     as model, on an NVIDIA GPU over cuda_ipc: only by --chaos-stage
model   a small real model instead of the paced engine
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.chaos.rounds import LONGEST_OUTPUT, ChaosLoad
from tests.models import VOCAB_SIZE, build_model, find_stable_prompts, load_reference_model
from tests.paced_reference import paced_reference_logprobs, paced_reference_tokens

_PACED_VOCAB = 32000
_SHARES = {"wide": 4, "device": 2, "tight": 2, "model": 2}  # of ten rounds
_FAMILIES = 4  # of prompts that begin alike


@dataclass(frozen=True, slots=True)
class ChaosStage:
    """A load and the cluster that it runs on."""

    load: ChaosLoad
    settings: dict[str, Any] = field(default_factory=dict)  # arguments of ProxiedCluster


def choose_stage(number: int, rounds: int) -> str:
    """The stage of round `number` of `rounds`; the rounds of a stage follow each other."""
    bound = 0.0
    for name, share in _SHARES.items():
        bound += share * rounds / sum(_SHARES.values())
        if number + 0.5 < bound:
            return name
    return name


def build_stage(name: str, folder: Path) -> ChaosStage:
    """`folder` keeps what takes long to make."""
    return _STAGES[name](folder)


def list_stages() -> Sequence[str]:
    return tuple(_STAGES)


def _wide_stage(_: Path) -> ChaosStage:
    lengths = (
        1,
        2,
        15,
        16,
        17,
        31,
        33,
        64,
        100,
        130,
        200,
        257,
        300,
    )  # around block and chunk boundaries
    settings = {"prefill": 2, "decode": 2, "per_node": _DECODE_1_ON_ANOTHER_HOST}
    return ChaosStage(
        ChaosLoad(
            6,
            _random_prompts(lengths, _PACED_VOCAB),
            paced_reference_tokens,
            paced_reference_logprobs,
        ),
        settings,
    )


def _device_stage(folder: Path) -> ChaosStage:
    wide = _wide_stage(folder)
    return replace(wide, settings=wide.settings | {"transport": "cuda_ipc", "device": "cpu"})


def _tight_stage(_: Path) -> ChaosStage:
    lengths = (16, 33, 300, 511, 512, 640, 800, 960)
    settings = {
        "prefill": 1,
        "decode": 2,
        "per_node": _DECODE_1_OVER_GRPC,
        "paced_prefill_us_per_token": 60.0,
    }
    return ChaosStage(
        ChaosLoad(
            14,
            _random_prompts(lengths, _PACED_VOCAB),
            paced_reference_tokens,
            paced_reference_logprobs,
        ),
        settings,
    )


def _model_stage(folder: Path) -> ChaosStage:
    """Greedy outputs of the reference cost as much as the cluster's own: the prompts come from a
    table."""
    model = build_model("llama", folder)
    loaded = load_reference_model(model)
    shared = [random.Random(0).randrange(VOCAB_SIZE) for _ in range(130)]
    fresh = find_stable_prompts(loaded, (1, 16, 33, 100, 257), LONGEST_OUTPUT)
    alike = find_stable_prompts(
        loaded, (131, 160, 200), LONGEST_OUTPUT, seed=1, shared_prefix=shared
    )
    answers = {entry.prompt: entry.reference_tokens for entry in (*fresh, *alike)}
    settings = {
        "prefill": 1,
        "decode": 2,
        "per_node": _DECODE_1_ON_ANOTHER_HOST,
        "engine": "model",
        "model": str(model),
        "dtype": "float32",
        "threads": "1",
        "other_model": {"model": str(build_model("llama", folder, seed=1))},
    }
    return ChaosStage(
        ChaosLoad(
            4, lambda rng: rng.choice(tuple(answers)), lambda prompt, n: answers[tuple(prompt)][:n]
        ),
        settings,
    )


def _gpu_stage(folder: Path) -> ChaosStage:
    model = _model_stage(folder)
    gpu = {"device": "cuda", "transport": "cuda_ipc", "prefill": 2, "decode": 1, "per_node": {}}
    return replace(model, settings=model.settings | gpu)


def _random_prompts(
    lengths: Sequence[int], vocab_size: int
) -> Callable[[random.Random], tuple[int, ...]]:
    """Half of them begin like others."""

    def draw(rng: random.Random) -> tuple[int, ...]:
        family = random.Random(rng.randrange(_FAMILIES))
        length = rng.choice(lengths)
        shared = rng.randrange(length + 1) if rng.random() < 0.5 else 0
        return tuple((family if i < shared else rng).randrange(vocab_size) for i in range(length))

    return draw


_DECODE_1_ON_ANOTHER_HOST = {
    "decode-1": {"host_id": "elsewhere"}
}  # so that its hand-offs go over TCP
_DECODE_1_OVER_GRPC = {"decode-1": {"transport": "grpc"}}
_STAGES: dict[str, Callable[[Path], ChaosStage]] = {
    "wide": _wide_stage,
    "device": _device_stage,
    "gpu": _gpu_stage,
    "tight": _tight_stage,
    "model": _model_stage,
}
