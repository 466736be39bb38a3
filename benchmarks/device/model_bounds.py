"""What a step of a model has to read and to compute, and the least time for it. Pure."""

from dataclasses import dataclass

from node_engine.model.config.model_config import ModelConfig

_SCALE_BYTES = 4  # of a quantized weight, for each of its output channels


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What the device reaches in operations of one kind alone."""

    read_bytes: float  # per second, from its memory
    products: float  # operations per second of large products of bf16 matrices
    to_device_bytes: float  # per second, from pinned host memory
    to_host_bytes: float  # per second, to pinned host memory


@dataclass(frozen=True, slots=True)
class ProductShape:
    """A weight [rows, columns] that a layer multiplies with."""

    name: str
    rows: int  # output channels
    columns: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns


def list_layer_products(config: ModelConfig) -> tuple[ProductShape, ...]:
    """The four products of a layer, as the engine joins them."""
    query = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    return (
        ProductShape("qkv", query + 2 * kv, config.hidden_size),
        ProductShape("output", config.hidden_size, query),
        ProductShape("gate_up", 2 * config.intermediate_size, config.hidden_size),
        ProductShape("down", config.hidden_size, config.intermediate_size),
    )


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers of a model from which the bounds of its steps follow."""

    layers: int
    layer_weights: int  # elements of the four products of a layer
    layer_bytes: int  # of these
    head_weights: int  # elements of the output layer
    embedding_weights: int  # elements that a step does not read as a whole; 0 if tied to the head
    norm_weights: int  # elements of all norms
    item_bytes: int  # of a weight and of a cached value
    kv_token_elements: int  # cached values of one token in all layers
    attention_width: int  # query heads times their dimension

    @staticmethod
    def from_config(
        config: ModelConfig, item_bytes: int = 2, *, is_fp8: bool = False
    ) -> "ModelSize":
        """`is_fp8`: the products of the layers have a byte for each weight, and scales."""
        products = list_layer_products(config)
        weights = sum(product.elements for product in products)
        scales = _SCALE_BYTES * sum(product.rows for product in products)
        vocabulary = config.vocab_size * config.hidden_size
        return ModelSize(
            layers=config.num_layers,
            layer_weights=weights,
            layer_bytes=weights + scales if is_fp8 else weights * item_bytes,
            head_weights=vocabulary,
            embedding_weights=0 if config.tied_embeddings else vocabulary,
            norm_weights=(2 * config.num_layers + 1) * config.hidden_size,
            item_bytes=item_bytes,
            kv_token_elements=2 * config.num_layers * config.num_kv_heads * config.head_dim,
            attention_width=config.num_heads * config.head_dim,
        )

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of the weights that every step reads: all but the embedding table."""
        others = (self.head_weights + self.norm_weights) * self.item_bytes
        return self.layers * self.layer_bytes + others

    @property
    def resident_bytes(self) -> int:
        """Bytes of all weights."""
        return self.step_weight_bytes + self.embedding_weights * self.item_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the cache for each token of context."""
        return self.kv_token_elements * self.item_bytes

    def decode_bytes(self, batch: int, context: int) -> int:
        """Bytes that a decode step reads: weights once, and the KV of every sequence."""
        return self.step_weight_bytes + batch * context * self.kv_token_bytes

    def decode_operations(self, batch: int, context: int) -> int:
        products = 2 * (self.layers * self.layer_weights + self.head_weights)
        attention = 4 * self.layers * self.attention_width * context
        return batch * (products + attention)

    def prefill_operations(self, tokens: int) -> int:
        """Operations of all layers for all tokens, with causal attention, and of one logit row."""
        products = 2 * tokens * self.layers * self.layer_weights
        attention = 4 * self.layers * self.attention_width * (tokens * (tokens + 1) // 2)
        return products + attention + 2 * self.head_weights

    def decode_bound(self, batch: int, context: int, rates: DeviceRates) -> float:
        """Least seconds of a decode step: by reading, or by computing for large batches."""
        return max(
            self.decode_bytes(batch, context) / rates.read_bytes,
            self.decode_operations(batch, context) / rates.products,
        )

    def prefill_bound(self, tokens: int, rates: DeviceRates) -> float:
        """Least seconds of the prefill of a prompt: by computing, or by reading if it is short."""
        return max(
            self.prefill_operations(tokens) / rates.products,
            self.step_weight_bytes / rates.read_bytes,
        )


@dataclass(frozen=True, slots=True)
class ServedBound:
    """The least latencies of a closed loop, and the most tokens."""

    ttft: float  # seconds, of a prompt that is alone
    tpot: float  # seconds
    tokens_per_second: float


def bound_served_row(
    size: ModelSize, rates: DeviceRates, prompt: int, output: int, concurrency: int
) -> ServedBound:
    """Bounds of `concurrency` requests that begin together and end together.

    Their prompts are computed one after another, and then all decode with the mean context.
    """
    tpot = size.decode_bound(concurrency, prompt + output // 2, rates)
    prefill = max(
        concurrency * size.prefill_operations(prompt) / rates.products,
        size.step_weight_bytes / rates.read_bytes,
    )
    seconds = prefill + (output - 1) * tpot
    return ServedBound(size.prefill_bound(prompt, rates), tpot, concurrency * output / seconds)
