"""What a Hugging Face folder says about its model, read without transformers, so that a node starts in a
second.

Whatever would change the arithmetic and is not built here is refused by name: an answer from a model that was
read wrongly is worse than none.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from node_engine.model.rope import RopeConfig, parse_rope

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM")
_ATTENTION_TYPES = {"full_attention"}

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture, resolved. `stored_dtype` is what the folder declares, as torch spells it."""

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
    rope: RopeConfig
    stored_dtype: str
    eos_token_ids: tuple[int, ...]


def load_config(folder: Path) -> ModelConfig:
    """Read config.json and generation_config.json. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder}: no such folder: give --model the path of a Hugging Face folder")
    raw = _read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else {}
    return parse_config(raw, generation)


def parse_config(raw: Json, generation: Json) -> ModelConfig:
    """Resolve the two files' contents. Raises ConfigError naming the key, its value and what is possible."""
    architecture = _architecture(raw)
    _refuse_unsupported(raw)
    vocab_size = _positive(raw, "vocab_size")
    heads = _positive(raw, "num_attention_heads")
    hidden = _positive(raw, "hidden_size")
    kv_heads = _positive(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}: fix config.json"
        )
    if raw.get("head_dim") is None and hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}: set head_dim in config.json"
        )
    head_dim = _positive(raw, "head_dim", hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd: rotary embedding needs pairs")
    max_positions = _positive(raw, "max_position_embeddings", 2048)
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=_positive(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=max_positions,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        output_bias=architecture == "LlamaForCausalLM" and attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias", False)),
        rope=parse_rope(raw, max_positions),
        stored_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_token_ids=_eos_token_ids(generation if "eos_token_id" in generation else raw, vocab_size),
    )


def _read_json(path: Path) -> Json:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file: give --model the path of a Hugging Face folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds a JSON {type(raw).__name__}, not an object")
    return raw


def _architecture(raw: Json) -> str:
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ConfigError(f"architectures {names!r} in config.json: Baton serves one of {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _refuse_unsupported(raw: Json) -> None:
    if raw.get("auto_map"):
        raise ConfigError(f"auto_map {raw['auto_map']!r}: remote code is never run: use a checkpoint without it")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(f"quantization_config with quant_method {method!r}: Baton reads unquantized weights only")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {raw['hidden_act']!r}: only 'silu' is built")
    if raw.get("use_sliding_window"):
        raise ConfigError("use_sliding_window true: sliding-window attention is not built; serve a model without it")
    for index, kind in enumerate(raw.get("layer_types") or ()):
        if kind not in _ATTENTION_TYPES:
            raise ConfigError(f"layer_types[{index}] {kind!r}: only {sorted(_ATTENTION_TYPES)} are built")


def _positive(raw: Json, key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ConfigError(f"config.json lacks {key}: it is no complete model configuration")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} {value!r} in config.json: must be an integer of at least 1")
    return value


def _eos_token_ids(raw: Json, vocab_size: int) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ConfigError(f"eos_token_id {value!r}: must be token ids from 0 up to vocab_size {vocab_size}")
    return tuple(dict.fromkeys(ids))
