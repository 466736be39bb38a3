"""Reads the model configuration of a Hugging Face folder, without importing transformers.

Settings that would change the arithmetic and are not supported are refused by name: wrong output
from a misread model is worse than an error.
"""

from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError
from baton.models import generation_defaults
from baton.models.generation_defaults import GenerationDefaults, load_generation_defaults
from baton.models.json_object import JsonObject, get_int_field, read_json_object
from node_engine.model.config.model_families import (
    MODEL_FAMILIES,
    BiasRule,
    ModelFamily,
    compute_layer_windows,
)
from node_engine.model.config.rope import RopeConfig, parse_rope


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture, with all defaults filled in. Field names follow Hugging Face's config."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # per layer: tokens that a query attends to, None for all
    rope: RopeConfig
    stored_dtype: str  # of the weights in the folder, as torch spells it
    eos_token_ids: tuple[int, ...]


def load_model_config(folder: Path) -> ModelConfig:
    """Read config.json and generation_config.json. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(
            f"model folder {folder}: no such folder: give --model the path of a Hugging Face folder"
        )
    return parse_model_config(
        read_json_object(folder / "config.json"), load_generation_defaults(folder)
    )


def parse_model_config(raw: JsonObject, generation: GenerationDefaults) -> ModelConfig:
    """Build the configuration from the contents of both files.

    Raises ConfigError that names the key, its value and the supported values.
    """
    architecture = _architecture(raw)
    family = MODEL_FAMILIES[architecture]
    _refuse_unsupported(raw)
    heads, kv_heads, head_dim = _heads(raw, family)
    num_layers = _positive(raw, "num_hidden_layers")
    max_positions = _positive(raw, "max_position_embeddings", family.default_max_positions)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=_positive(raw, "hidden_size"),
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=max_positions,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=_bias(raw, family.qkv_bias),
        output_bias=_bias(raw, family.output_bias),
        mlp_bias=family.has_mlp_bias_key and bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        windows=compute_layer_windows(raw, family, num_layers),
        rope=parse_rope(raw, max_positions),
        stored_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_token_ids=_eos_token_ids(raw, generation),
    )


def _heads(raw: JsonObject, family: ModelFamily) -> tuple[int, int, int]:
    """Query heads, KV heads and head_dim; null in config.json means the derived default."""
    heads, hidden = _positive(raw, "num_attention_heads"), _positive(raw, "hidden_size")
    assumed = heads if "num_key_value_heads" in raw else family.default_kv_heads or heads
    kv_heads = _positive(raw, "num_key_value_heads", assumed)
    if heads % kv_heads:
        raise ConfigError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}:"
            " fix config.json"
        )
    if raw.get("head_dim", family.default_head_dim) is None and hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}:"
            " set head_dim in config.json"
        )
    head_dim = _positive(raw, "head_dim", family.default_head_dim or hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd: rotary embedding needs pairs")
    return heads, kv_heads, head_dim


def _bias(raw: JsonObject, bias: BiasRule) -> bool:
    return bias == "fixed" or (bias == "config" and bool(raw.get("attention_bias", False)))


def _architecture(raw: JsonObject) -> str:
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in MODEL_FAMILIES:
        raise ConfigError(
            f"architectures {names!r} in config.json:"
            f" Baton serves one of {', '.join(MODEL_FAMILIES)}"
        )
    return str(names[0])


def _refuse_unsupported(raw: JsonObject) -> None:
    if raw.get("auto_map"):
        raise ConfigError(
            f"auto_map {raw['auto_map']!r}: remote code is never run: use a checkpoint without it"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(
            f"quantization_config with quant_method {method!r}:"
            " Baton reads unquantized weights only"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {raw['hidden_act']!r}: only 'silu' is supported")


def _positive(raw: JsonObject, key: str, default: int | None = None) -> int:
    value = get_int_field(raw, key, 1)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json lacks {key}: it is not a complete model configuration")
    return value


def _eos_token_ids(raw: JsonObject, generation: GenerationDefaults) -> tuple[int, ...]:
    """EOS ids of both files. Raises ConfigError for an id outside the vocabulary."""
    ids = (*generation_defaults.parse_eos_token_ids(raw, "config.json"), *generation.eos_token_ids)
    vocab_size = _positive(raw, "vocab_size")
    if ids and max(ids) >= vocab_size:
        raise ConfigError(f"eos_token_id {max(ids)}: must be below vocab_size {vocab_size}")
    return tuple(dict.fromkeys(ids))
