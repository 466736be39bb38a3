"""The architectures that are built, and where they differ: what each one's configuration class in transformers assumes
when config.json is silent, and what its model class fixes or reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from baton.errors import ConfigError
from baton.json_object import Json, integer

# no: never. config: `attention_bias` says. fixed: always.
Bias = Literal["no", "config", "fixed"]
# never: every layer attends to everything. always: to `sliding_window` tokens, unless that is null.
# switched: so from layer `max_window_layers` on, if `use_sliding_window` is true.
Windows = Literal["never", "always", "switched"]

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """`kv_heads` None: as many as heads. `head_dim` None: hidden_size / heads."""

    kv_heads: int | None
    max_positions: int
    head_dim: int | None = None
    qkv_bias: Bias = "no"
    output_bias: Bias = "no"
    mlp_bias: bool = False  # is `mlp_bias` read?
    qk_norm: bool = False
    windows: Windows = "never"


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(None, 2048, qkv_bias="config", output_bias="config", mlp_bias=True),
    "MistralForCausalLM": Family(8, 131072, windows="always"),
    "Qwen2ForCausalLM": Family(32, 32768, qkv_bias="fixed", windows="switched"),
    "Qwen3ForCausalLM": Family(
        32, 32768, head_dim=128, qkv_bias="config", output_bias="config", qk_norm=True, windows="switched"
    ),
}
_WINDOW, _MAX_WINDOW_LAYERS = 4096, 28  # where a family has windows and config.json is silent


def layer_windows(raw: Json, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """How many tokens a query of each layer sees, itself among them; None for all before it. Raises ConfigError naming
    the key, its value and what is possible."""
    window = _window(raw, family)
    kinds = raw.get("layer_types")
    if kinds is None:
        first = integer(raw, "max_window_layers", 0) if family.windows == "switched" else 0
        first = _MAX_WINDOW_LAYERS if first is None else first
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ConfigError(f"layer_types {kinds!r} in config.json: must be a list of num_hidden_layers {num_layers}")
    for layer, kind in enumerate(kinds):
        if kind not in (FULL, SLIDING):
            raise ConfigError(f"layer_types[{layer}] {kind!r}: only {FULL} and {SLIDING} are built")
        if kind == SLIDING and window is None:
            raise ConfigError(f"layer_types[{layer}] {kind!r}: {_why_no_window(family)}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _window(raw: Json, family: Family) -> int | None:
    switch = raw.get("use_sliding_window", False)
    if switch is not None and not isinstance(switch, bool):
        raise ConfigError(f"use_sliding_window {switch!r} in config.json: must be true or false")
    if family.windows == "never" and switch:
        raise ConfigError("use_sliding_window true: this architecture has no sliding window; set it to false")
    unread = family.windows == "never" or (family.windows == "switched" and not switch)
    if unread or ("sliding_window" in raw and raw["sliding_window"] is None):
        return None
    return integer(raw, "sliding_window", 1) or _WINDOW


def _why_no_window(family: Family) -> str:
    if family.windows == "never":
        return "this architecture has no sliding window"
    also = " and use_sliding_window must be true" if family.windows == "switched" else ""
    return f"sliding_window must be a number{also}"
