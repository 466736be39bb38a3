"""The supported architectures and their differences.

For each: the defaults of its configuration class in transformers for keys that config.json lacks,
and the features that its model class always has or reads from config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from baton.errors import ConfigError
from baton.models.json_object import JsonObject, get_int_field

# no: never. config: as `attention_bias` says. fixed: always.
BiasRule = Literal["no", "config", "fixed"]
# never: every layer has full attention. always: `sliding_window` tokens, unless that is null.
# switched: as always, from layer `max_window_layers` on, if `use_sliding_window` is true.
WindowRule = Literal["never", "always", "switched"]

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Defaults and features of one architecture."""

    default_kv_heads: int | None  # None: as many as attention heads
    default_max_positions: int
    default_head_dim: int | None = None  # None: hidden_size / heads
    qkv_bias: BiasRule = "no"
    output_bias: BiasRule = "no"
    has_mlp_bias_key: bool = False  # whether config.json may have `mlp_bias`
    qk_norm: bool = False
    window_rule: WindowRule = "never"


MODEL_FAMILIES: Mapping[str, ModelFamily] = {
    "LlamaForCausalLM": ModelFamily(
        None, 2048, qkv_bias="config", output_bias="config", has_mlp_bias_key=True
    ),
    "MistralForCausalLM": ModelFamily(8, 131072, window_rule="always"),
    "Qwen2ForCausalLM": ModelFamily(32, 32768, qkv_bias="fixed", window_rule="switched"),
    "Qwen3ForCausalLM": ModelFamily(
        32,
        32768,
        default_head_dim=128,
        qkv_bias="config",
        output_bias="config",
        qk_norm=True,
        window_rule="switched",
    ),
}
# For families with windows, where config.json lacks the keys.
_DEFAULT_WINDOW, _DEFAULT_MAX_WINDOW_LAYERS = 4096, 28


def compute_layer_windows(
    raw: JsonObject, family: ModelFamily, num_layers: int
) -> tuple[int | None, ...]:
    """Attention window of each layer in tokens, the query itself included; None: full attention.

    Raises ConfigError that names the key, its value and the supported values.
    """
    window = _window(raw, family)
    kinds = raw.get("layer_types")
    if kinds is None:
        first = (
            get_int_field(raw, "max_window_layers", 0) if family.window_rule == "switched" else 0
        )
        first = _DEFAULT_MAX_WINDOW_LAYERS if first is None else first
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ConfigError(
            f"layer_types {kinds!r} in config.json:"
            f" must be a list of num_hidden_layers {num_layers}"
        )
    for layer, kind in enumerate(kinds):
        if kind not in (FULL_ATTENTION, SLIDING_ATTENTION):
            raise ConfigError(
                f"layer_types[{layer}] {kind!r}:"
                f" only {FULL_ATTENTION} and {SLIDING_ATTENTION} are supported"
            )
        if kind == SLIDING_ATTENTION and window is None:
            raise ConfigError(f"layer_types[{layer}] {kind!r}: {_explain_no_window(family)}")
    return tuple(window if kind == SLIDING_ATTENTION else None for kind in kinds)


def _window(raw: JsonObject, family: ModelFamily) -> int | None:
    switch = raw.get("use_sliding_window", False)
    if switch is not None and not isinstance(switch, bool):
        raise ConfigError(f"use_sliding_window {switch!r} in config.json: must be true or false")
    if family.window_rule == "never" and switch:
        raise ConfigError(
            "use_sliding_window true: this architecture has no sliding window; set it to false"
        )
    unread = family.window_rule == "never" or (family.window_rule == "switched" and not switch)
    if unread or ("sliding_window" in raw and raw["sliding_window"] is None):
        return None
    return get_int_field(raw, "sliding_window", 1) or _DEFAULT_WINDOW


def _explain_no_window(family: ModelFamily) -> str:
    if family.window_rule == "never":
        return "this architecture has no sliding window"
    also = " and use_sliding_window must be true" if family.window_rule == "switched" else ""
    return f"sliding_window must be a number{also}"
