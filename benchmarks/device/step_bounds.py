"""The least time for a step of a model, by what it has to read and to compute. Pure."""

from dataclasses import dataclass

from baton.kv.blocks import DTYPE_BYTES, KVLayout
from baton.models.model_identity import NATIVE_IMPLEMENTATION, UNQUANTIZED, ModelIdentity
from baton.types import SamplingParams
from node_engine.core.metrics.step_costs import StepCosts
from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.config.model_size import build_model_size

_BLOCK_SIZE = 16  # tokens; the bounds do not depend on it
_SAMPLING = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class StepRates:
    """The rates that bound a step, each reached by operations of one kind alone."""

    read_bytes: float  # per second, from memory
    products: float  # operations per second of large matrix products


@dataclass(frozen=True, slots=True)
class DeviceRates(StepRates):
    """What a GPU reaches; its products are of bf16 matrices."""

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


class StepBounds:
    """Bounds of the steps of one model, by the same counts as the metrics MFU and MBU.

    A step takes at least as long as reading what it has to read, and as its operations at the rate
    of products.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: str = "bfloat16",
        quantization: str = UNQUANTIZED,
        compressed_fraction: float = 1.0,
    ) -> None:
        """`compressed_fraction`: size of the stored weights by their size without compression."""
        size = build_model_size(config)
        self._layout = KVLayout(
            config.num_layers, config.num_kv_heads, config.head_dim, _BLOCK_SIZE, dtype
        )
        identity = ModelIdentity(
            implementation=NATIVE_IMPLEMENTATION,
            model_digest="",
            dtype=dtype,
            quantization=quantization,
            layout=self._layout,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
        )
        self._costs = StepCosts(size, identity)
        tables = 1 if config.tied_embeddings else 2
        self._weights = size.layer_parameters + tables * size.head_parameters
        self._item_bytes = DTYPE_BYTES[dtype]
        read = size.layer_parameters + size.head_parameters
        self._saved_bytes = (1.0 - compressed_fraction) * read * self._item_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of all weights without quantization: also the embedding table."""
        return self._weights * self._item_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the cache for each token of context."""
        return self._layout.token_bytes

    def bound_decode(self, batch: int, context: int, rates: StepRates) -> float:
        """Least seconds of a decode step of sequences with so many tokens of context."""
        return self._bound_slices([_make_slice(context - 1, 1)] * batch, rates)

    def bound_prefill(self, tokens: int, rates: StepRates, prompts: int = 1) -> float:
        """Least seconds of the prefill of prompts that are computed together."""
        return self._bound_slices([_make_slice(0, tokens)] * prompts, rates)

    def _bound_slices(self, slices: list[SequenceSlice], rates: StepRates) -> float:
        work = self._costs.measure_step(StepBatch(tuple(slices)))
        read = work.memory_bytes - self._saved_bytes
        return max(read / rates.read_bytes, work.flops / rates.products)


def _make_slice(start: int, tokens: int) -> SequenceSlice:
    """A slice whose next token is sampled. Its costs do not depend on what it has besides."""
    spec = SampleSpec(_SAMPLING, 0, start + tokens)
    return SequenceSlice(SequenceId(0), (0,) * tokens, start, (), spec)


@dataclass(frozen=True, slots=True)
class ServedBound:
    """The least latencies of a closed loop, and the most tokens."""

    ttft: float  # seconds, of a prompt that is alone
    tpot: float  # seconds
    tokens_per_second: float


def bound_served_row(
    bounds: StepBounds, rates: StepRates, prompt: int, output: int, concurrency: int
) -> ServedBound:
    """Bounds of `concurrency` requests that begin together and end together.

    First all prompts are computed, and then all sequences decode with the mean context.
    """
    tpot = bounds.bound_decode(concurrency, prompt + output // 2, rates)
    seconds = bounds.bound_prefill(prompt, rates, concurrency) + (output - 1) * tpot
    ttft = bounds.bound_prefill(prompt, rates)
    return ServedBound(ttft, tpot, concurrency * output / seconds)
