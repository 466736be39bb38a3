"""Rotary embedding (RoPE) of types `default`, `linear`, `llama3`; keys of transformers 4 and 5."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.errors import ConfigError

ROPE_TYPES = ("default", "linear", "llama3")
_DEFAULT_THETA = 10000.0
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of the rotary embedding."""

    type: str
    theta: float  # the base of the frequencies
    factor: float = 1.0  # for `linear` and `llama3`; the fields below for `llama3` alone
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


def parse_rope(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` (transformers 4).

    If both are given, `rope_scaling` wins, as in transformers. Raises ConfigError.
    """
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    scaling = raw.get(key) or {}
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"{key} {scaling!r} in config.json: must be an object")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ConfigError(
            f"{key} differs between layer types {sorted(scaling)}: one for all layers is supported"
        )
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(f"partial_rotary_factor {partial!r}: only whole heads are rotated")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(f"{key} of type {kind!r}: only {', '.join(ROPE_TYPES)} are supported")
    theta = _positive_number(
        {"rope_theta": raw.get("rope_theta", _DEFAULT_THETA)} | dict(scaling), key, "rope_theta"
    )
    if kind == "default":
        return RopeConfig(kind, theta)
    if kind == "linear":
        return RopeConfig(kind, theta, _positive_number(scaling, key, "factor"))
    given = dict(scaling)
    given.setdefault("original_max_position_embeddings", max_positions)
    factor, low, high, original = (_positive_number(given, key, name) for name in _LLAMA3_KEYS)
    if low >= high:
        raise ConfigError(f"{key}: low_freq_factor {low} must be below high_freq_factor {high}")
    return RopeConfig(kind, theta, factor, low, high, int(original))


def _positive_number(scaling: Mapping[str, Any], key: str, name: str) -> float:
    value = scaling.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{key}.{name} {value!r} in config.json: must be a number above 0")
    return float(value)


def compute_inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, fp32 [head_dim // 2].

    `linear` (Chen et al., 2023): all wavelengths are stretched by `factor`, as if positions were
    divided by it. `llama3` (Llama 3.1): wavelengths beyond original / low_freq_factor are stretched
    by `factor`, those below original / high_freq_factor are kept, those between are blended.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "default":
        return frequencies
    if rope.type == "linear":
        return frequencies / rope.factor
    # Rotations within the context length of pre-training.
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(
        0.0, 1.0
    )
    return (1.0 - kept) * frequencies / rope.factor + kept * frequencies


def compute_angles(
    frequencies: torch.Tensor,  # fp32 [head_dim // 2]
    positions: torch.Tensor,  # int64 [tokens]
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine, both [tokens, 1, head_dim], as kv_kernels' rotary_ takes them."""
    radians = positions.to(torch.float32)[:, None, None] * frequencies
    cos, sin = radians.cos().to(dtype), radians.sin().to(dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
