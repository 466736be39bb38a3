import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kv_kernels.reference.elementwise import rotary_
from node_engine.model.config.rope import RopeConfig, compute_angles, compute_inverse_frequencies

HEAD_DIM = 32
LINEAR = RopeConfig("linear", 1e4, 4.0)
LLAMA3 = RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 256)


def reference(rope: RopeConfig) -> LlamaRotaryEmbedding:
    parameters = {"rope_type": rope.type, "rope_theta": rope.theta}
    if rope.type == "linear":
        parameters["factor"] = rope.factor
    if rope.type == "llama3":
        parameters |= {
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
    return LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=2 * HEAD_DIM, num_attention_heads=2, rope_parameters=parameters)
    )


@pytest.mark.parametrize(
    "rope", [RopeConfig("default", 1e4), LINEAR, LLAMA3], ids=lambda rope: rope.type
)
def test_rotation_equals_transformers(rope: RopeConfig) -> None:
    positions = torch.tensor([0, 1, 17, 255, 256, 4000])
    x = torch.randn(1, 3, len(positions), HEAD_DIM, generator=torch.Generator().manual_seed(0))
    cos, sin = reference(rope)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    mine = x[0].transpose(0, 1).clone()
    rotary_(
        mine, *compute_angles(compute_inverse_frequencies(rope, HEAD_DIM), positions, torch.float32)
    )
    torch.testing.assert_close(mine, expected[0].transpose(0, 1), atol=1e-5, rtol=0.0)


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    plain, scaled = (
        compute_inverse_frequencies(RopeConfig("default", 5e5), HEAD_DIM),
        compute_inverse_frequencies(LLAMA3, HEAD_DIM),
    )
    assert scaled[0] == plain[0]
    torch.testing.assert_close(scaled[-1], plain[-1] / LLAMA3.factor)
    between = (scaled < plain) & (scaled > plain / LLAMA3.factor)
    assert between.any()
