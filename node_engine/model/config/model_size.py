"""The sizes of a model that decide what its steps cost."""

from node_engine.core.step.engine import ModelSize
from node_engine.model.config.model_config import ModelConfig


def build_model_size(config: ModelConfig) -> ModelSize:
    """Count the weights of the matrix products; norms and biases are too small to matter."""
    hidden, query = config.hidden_size, config.num_heads * config.head_dim
    key_value = 2 * config.num_kv_heads * config.head_dim
    attention = hidden * (query + key_value) + query * hidden
    mlp = 3 * hidden * config.intermediate_size  # gate, up and down
    return ModelSize(
        layer_parameters=config.num_layers * (attention + mlp),
        head_parameters=hidden * config.vocab_size,
        attention_width=query,
        windows=config.windows,
    )
