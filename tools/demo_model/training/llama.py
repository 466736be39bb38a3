"""A trainable Llama whose parameters have Hugging Face's names, so that they export unchanged.

Architecture: Touvron et al. 2023, with grouped-query attention (Ainslie et al. 2023) and tied
embeddings.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPSILON = 1e-5
ROPE_THETA = 10000.0
INITIALIZER_RANGE = 0.02


@dataclass(frozen=True, slots=True)
class LlamaShape:
    vocabulary: int
    hidden: int = 256
    intermediate: int = 768
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    context: int = 2048  # positions trained on

    def to_hf_config(self, bos: int, eos: int) -> dict[str, Any]:
        """Return `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "rms_norm_eps": NORM_EPSILON,
            "rope_theta": ROPE_THETA,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": INITIALIZER_RANGE,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "dtype": "bfloat16",
        }

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class LlamaRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPSILON)
        return self.weight * scaled.to(x.dtype)


class LlamaAttention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` is [batch, positions, hidden]; `cos` and `sin` are [positions, head_dim]."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_embedding(query, cos, sin), apply_rotary_embedding(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class LlamaMLP(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LlamaDecoderLayer(nn.Module):
    def __init__(self, shape: LlamaShape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(shape.hidden)
        self.self_attn = LlamaAttention(shape)
        self.post_attention_layernorm = LlamaRMSNorm(shape.hidden)
        self.mlp = LlamaMLP(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        out: Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return out


class LlamaModel(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(LlamaDecoderLayer(shape, dropout) for _ in range(shape.layers))
        self.norm = LlamaRMSNorm(shape.hidden)
        self.dropout = nn.Dropout(dropout)
        frequencies = 1.0 / ROPE_THETA ** (
            torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        )
        angles = torch.outer(torch.arange(shape.context).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = tokens.shape[1]
        cos, sin = self.cos[:positions], self.sin[:positions]
        x = self.dropout(self.embed_tokens(tokens))
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class LlamaForTraining(nn.Module):
    """Llama with normal initial weights.

    Those that write to the residual stream are narrower with depth (GPT-2).
    """

    def __init__(self, shape: LlamaShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.model = LlamaModel(shape, dropout)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                narrowed = (
                    (2 * shape.layers) ** -0.5
                    if name.endswith(("o_proj.weight", "down_proj.weight"))
                    else 1.0
                )
                nn.init.normal_(parameter, std=INITIALIZER_RANGE * narrowed)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, positions, vocabulary] for token ids [batch, positions]."""
        return F.linear(self.model(tokens), self.model.embed_tokens.weight)


def apply_rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding (Su et al. 2021) to the two halves of each head."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
