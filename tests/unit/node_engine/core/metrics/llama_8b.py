"""The sizes of Llama 3.1 8B, as its config.json has them."""

from typing import Any

from baton.kv.blocks import KVLayout
from baton.models.generation_defaults import GenerationDefaults

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}
LLAMA_8B_LAYOUT = KVLayout(32, 8, 128, 16, "bfloat16")
NO_DEFAULTS = GenerationDefaults()
