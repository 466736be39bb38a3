import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from baton.errors import ConfigError
from baton.models.generation_defaults import GenerationDefaults, parse_generation_defaults
from node_engine.model.config.model_config import load_model_config, parse_model_config
from node_engine.model.config.rope import RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}
MIXED = ["full_attention", "sliding_attention"]
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
NOTHING = GenerationDefaults()
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def test_defaults_of_an_old_llama() -> None:
    config = parse_model_config(
        {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, NOTHING
    )
    assert (config.num_kv_heads, config.head_dim, config.stored_dtype) == (4, 16, "bfloat16")
    assert config.rope == RopeConfig("default", 10000.0)
    assert not any(
        (
            config.tied_embeddings,
            config.qkv_bias,
            config.output_bias,
            config.mlp_bias,
            config.qk_norm,
        )
    )
    assert config.windows == (None, None)
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("architecture", "silent", "asked"),
    [
        ("LlamaForCausalLM", (False, False, False), (True, True, True)),
        ("MistralForCausalLM", (False, False, False), (False, False, False)),
        ("Qwen2ForCausalLM", (True, False, False), (True, False, False)),
        ("Qwen3ForCausalLM", (False, False, False), (True, True, False)),
    ],
)
def test_biases_of_each_family(
    architecture: str, silent: tuple[bool, bool, bool], asked: tuple[bool, bool, bool]
) -> None:
    for extra, expected in (({}, silent), ({"attention_bias": True, "mlp_bias": True}, asked)):
        config = parse_model_config(LLAMA | {"architectures": [architecture]} | extra, NOTHING)
        assert (config.qkv_bias, config.output_bias, config.mlp_bias) == expected
        assert config.qk_norm == (architecture == "Qwen3ForCausalLM")


ASSUMED: list[tuple[type[PreTrainedConfig], str, dict[str, Any]]] = [
    (LlamaConfig, "LlamaForCausalLM", {}),
    (MistralConfig, "MistralForCausalLM", {}),
    (MistralConfig, "MistralForCausalLM", {"sliding_window": None}),
    (MistralConfig, "MistralForCausalLM", {"sliding_window": 37}),
    (Qwen2Config, "Qwen2ForCausalLM", {}),
    (Qwen2Config, "Qwen2ForCausalLM", {"sliding_window": 37}),
    (Qwen2Config, "Qwen2ForCausalLM", {"use_sliding_window": True}),
    (
        Qwen2Config,
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 3},
    ),
    (
        Qwen2Config,
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    ),
    (Qwen2Config, "Qwen2ForCausalLM", {"layer_types": ["full_attention"] * 32}),
    (Qwen3Config, "Qwen3ForCausalLM", {}),
    (Qwen3Config, "Qwen3ForCausalLM", {"use_sliding_window": True, "max_window_layers": 31}),
    (
        Qwen3Config,
        "Qwen3ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 16,
        },
    ),
]


@pytest.mark.parametrize(("cls", "architecture", "said"), ASSUMED, ids=str)
def test_missing_config_keys_default_as_in_transformers(
    cls: type[PreTrainedConfig], architecture: str, said: dict[str, Any]
) -> None:
    theirs = cls(**said)
    sizes = {key: getattr(theirs, key) for key in SIZES}
    mine = parse_model_config({"architectures": [architecture]} | sizes | said, NOTHING)
    kv_heads, positions = theirs.num_key_value_heads, theirs.max_position_embeddings
    assert (mine.num_kv_heads, mine.max_position_embeddings) == (kv_heads, positions)
    assert mine.head_dim == getattr(
        theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads
    )
    assert (mine.norm_eps, mine.tied_embeddings) == (
        theirs.rms_norm_eps,
        theirs.tie_word_embeddings,
    )
    assert mine.rope.theta == theirs.rope_parameters["rope_theta"]
    everywhere = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", ["sliding_attention"] * theirs.num_hidden_layers)
    assert mine.windows == tuple(
        everywhere if kind == "sliding_attention" else None for kind in kinds
    )


def test_layer_types_mix_full_and_sliding_layers() -> None:
    config = parse_model_config(
        LLAMA | MISTRAL | {"sliding_window": 8, "layer_types": MIXED}, NOTHING
    )
    assert config.windows == (None, 8)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {
            "rope_theta": 5e5,
            "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in LLAMA3.items()},
        },
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    ],
    ids=["rope_scaling", "rope_scaling with type", "rope_parameters"],
)
def test_llama3_scaling_in_every_spelling(spelling: dict[str, Any]) -> None:
    assert parse_model_config(LLAMA | spelling, NOTHING).rope == RopeConfig(
        "llama3", 5e5, 8.0, 1.0, 4.0, 1024
    )


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e6}},
        {
            "rope_theta": 1e6,
            "rope_scaling": {"type": "linear", "factor": 2.5},
            "rope_parameters": {"rope_theta": 5.0},
        },
    ],
    ids=["rope_scaling with type", "rope_scaling", "rope_parameters", "both"],
)
def test_linear_scaling_in_every_spelling(spelling: dict[str, Any]) -> None:
    assert parse_model_config(LLAMA | spelling, NOTHING).rope == RopeConfig("linear", 1e6, 2.5)
    theirs: Any = LlamaConfig(**spelling).rope_parameters
    assert (theirs["rope_type"], theirs["rope_theta"], theirs["factor"]) == ("linear", 1e6, 2.5)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_default_rope_in_every_spelling(spelling: dict[str, Any]) -> None:
    assert parse_model_config(LLAMA | spelling, NOTHING).rope == RopeConfig("default", 1e6)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": [2, 3]}, {}, (2, 3)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 8, 7]}, (2, 7, 8)),
        ({"eos_token_id": [2, 7]}, {"eos_token_id": 7}, (2, 7)),
        ({"eos_token_id": 2}, {"eos_token_id": None}, (2,)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": None}, {}, ()),
    ],
)
def test_eos_ids_of_both_files_are_merged(
    config: dict[str, Any], generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert (
        parse_model_config(LLAMA | config, parse_generation_defaults(generation)).eos_token_ids
        == expected
    )


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"architectures": ["MambaForCausalLM"]},
        ["architectures", "MambaForCausalLM", "LlamaForCausalLM"],
    ),
    ({"architectures": None}, ["architectures"]),
    ({"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]}, ["architectures"]),
    ({"auto_map": {"AutoModel": "m.M"}}, ["auto_map", "m.M", "remote code"]),
    ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "awq"]),
    ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    ({"use_sliding_window": True}, ["use_sliding_window", "no sliding window"]),
    ({"use_sliding_window": "yes"}, ["use_sliding_window", "'yes'"]),
    (
        {"layer_types": ["full_attention", "sliding_attention"]},
        ["layer_types[1]", "sliding_attention"],
    ),
    (
        {"layer_types": ["full_attention", "linear_attention"]},
        ["layer_types[1]", "linear_attention", "sliding_attention"],
    ),
    ({"layer_types": ["full_attention"]}, ["layer_types", "num_hidden_layers 2"]),
    ({"layer_types": "full_attention"}, ["layer_types", "num_hidden_layers 2"]),
    (MISTRAL | {"sliding_window": 0}, ["sliding_window 0"]),
    (MISTRAL | {"sliding_window": "4k"}, ["sliding_window '4k'"]),
    (
        MISTRAL | {"sliding_window": None, "layer_types": MIXED},
        ["layer_types[1]", "sliding_window must be a number"],
    ),
    (
        QWEN3 | {"sliding_window": 8, "layer_types": MIXED},
        ["layer_types[1]", "use_sliding_window must be true"],
    ),
    (QWEN3 | {"use_sliding_window": True, "max_window_layers": -1}, ["max_window_layers -1"]),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn", "llama3"]),
    ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "None"]),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, ["rope_scaling.factor", "0"]),
    ({"rope_theta": None}, ["rope_theta", "None"]),
    ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters", "longrope"]),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        ["rope_parameters", "full_attention"],
    ),
    ({"rope_parameters": LLAMA3 | {"factor": None}}, ["rope_parameters.factor", "None"]),
    ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, ["low_freq_factor", "4.0"]),
    ({"rope_scaling": "llama3"}, ["rope_scaling", "llama3"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
    ({"hidden_size": 66}, ["hidden_size 66", "head_dim"]),
    ({"head_dim": 15}, ["head_dim 15"]),
    ({"vocab_size": None}, ["vocab_size"]),
    ({"num_hidden_layers": "2"}, ["num_hidden_layers", "'2'"]),
    ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
    (QWEN3 | {"head_dim": 0}, ["head_dim 0"]),
    ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
    ({"eos_token_id": 100}, ["eos_token_id", "100", "vocab_size"]),
]


@pytest.mark.parametrize(
    ("change", "named"), REFUSED, ids=[str(change)[:50] for change, _ in REFUSED]
)
def test_unsupported_config_is_refused_by_name(change: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_model_config(LLAMA | change, NOTHING)
    for word in named:
        assert word in refused.value.message


@pytest.mark.parametrize("content", [None, "{", "[1]"], ids=["missing", "broken", "no object"])
def test_an_unreadable_config_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_config(tmp_path)
    with pytest.raises(ConfigError, match="no-such-folder"):
        load_model_config(tmp_path / "no-such-folder")


def test_a_folder_is_read_with_its_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert load_model_config(tmp_path).eos_token_ids == (2, 5)
