import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from node_engine.model.config import load_config, parse_config
from node_engine.model.rope import RopeConfig

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
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def test_defaults_of_an_old_llama() -> None:
    config = parse_config({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, {})
    assert (config.num_kv_heads, config.head_dim, config.stored_dtype) == (4, 16, "bfloat16")
    assert config.rope == RopeConfig("default", 10000.0)
    assert not any((config.tied_embeddings, config.qkv_bias, config.output_bias, config.mlp_bias))
    assert config.eos_token_ids == ()


def test_biases_of_each_family() -> None:
    qwen = parse_config(LLAMA | {"architectures": ["Qwen2ForCausalLM"]}, {})
    assert (qwen.qkv_bias, qwen.output_bias, qwen.mlp_bias) == (True, False, False)
    llama = parse_config(LLAMA | {"attention_bias": True, "mlp_bias": True}, {})
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)


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
    assert parse_config(LLAMA | spelling, {}).rope == RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 1024)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_default_rope_in_every_spelling(spelling: dict[str, Any]) -> None:
    assert parse_config(LLAMA | spelling, {}).rope == RopeConfig("default", 1e6)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": [2, 3]}, {}, (2, 3)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 8, 7]}, (7, 8)),
        ({"eos_token_id": 2}, {"eos_token_id": None}, ()),
        ({"eos_token_id": None}, {}, ()),
    ],
)
def test_eos_comes_from_the_generation_config_first(
    config: dict[str, Any], generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert parse_config(LLAMA | config, generation).eos_token_ids == expected


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"architectures": ["MambaForCausalLM"]}, ["architectures", "MambaForCausalLM", "LlamaForCausalLM"]),
    ({"architectures": None}, ["architectures"]),
    ({"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]}, ["architectures"]),
    ({"auto_map": {"AutoModel": "m.M"}}, ["auto_map", "m.M", "remote code"]),
    ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "awq"]),
    ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    ({"use_sliding_window": True}, ["use_sliding_window"]),
    ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types[1]", "sliding_attention"]),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn", "llama3"]),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ["rope_scaling", "linear"]),
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
    ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
    ({"eos_token_id": 100}, ["eos_token_id", "100", "vocab_size"]),
]


@pytest.mark.parametrize(("change", "named"), REFUSED, ids=[str(change)[:50] for change, _ in REFUSED])
def test_what_is_not_built_is_refused_by_name(change: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(LLAMA | change, {})
    for word in named:
        assert word in refused.value.message


@pytest.mark.parametrize("content", [None, "{", "[1]"], ids=["missing", "broken", "no object"])
def test_an_unreadable_config_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="no-such-folder"):
        load_config(tmp_path / "no-such-folder")


def test_a_folder_is_read_with_its_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert load_config(tmp_path).eos_token_ids == (5,)
