"""The settings of a node process."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from baton.config.common import (
    MemberConfig,
    ModelSourceConfig,
    NonNegativeInt,
    PositiveInt,
    Seconds,
    help_text,
)

NO_WEIGHT_CACHE = "off"  # value of weight_cache_dir


@dataclass(frozen=True, kw_only=True)
class NodeConfig(ModelSourceConfig, MemberConfig):
    """Settings that `python -m prefill_node` and `python -m decode_node` read."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        help_text("What computes; auto: an NVIDIA GPU if there is one"),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        help_text("Of weights and cache; auto: the model's own, float16 as bfloat16"),
    ] = "auto"
    quantize: Annotated[
        Literal["none", "fp8", "int8"],
        help_text(
            "Of the layers' products, when loaded; int8: on CPUs; fp8: e4m3, on a GPU that has FP8"
        ),
    ] = "none"
    kv_dtype: Annotated[
        Literal["auto", "int8"],
        help_text("Of the KV cache; auto: that of --dtype; int8: half of bfloat16, on CPUs"),
    ] = "auto"
    deterministic: Annotated[
        bool,
        help_text(
            "Compute each request's tokens in the same order, whatever else is computed with "
            "them; slower on a GPU, and what native CPU kernels always do"
        ),
    ] = False
    cpu_kernels: Annotated[
        Literal["auto", "native", "torch"],
        help_text("What computes on CPUs; auto: Baton's native kernels if they are there"),
    ] = "auto"
    compact_weights: Annotated[
        bool,
        help_text(
            "Store bfloat16 weights in 12 bits without loss, for native CPU kernels: the same "
            "tokens, and steps that wait for memory take less time; prompts may take a little more"
        ),
    ] = True
    threads: Annotated[
        str,
        help_text(
            "Compute threads of a node at most; auto: one for each core. With native kernels the "
            "nodes of a host that compute divide its cores among them; without, auto is the cores "
            "divided by --nodes-per-host"
        ),
    ] = "auto"
    max_model_len: Annotated[
        NonNegativeInt, help_text("Longest prompt plus output in tokens; 0 takes the model's own")
    ] = 0
    kv_memory: Annotated[
        str,
        help_text(
            "Cache memory of a node: 4GiB, a share such as 0.5, or auto: a tenth, at most 1GiB; "
            "on a GPU a share of its memory, and auto most of what is free there"
        ),
    ] = "auto"
    nodes_per_gpu: Annotated[
        PositiveInt,
        help_text("Nodes that share this node's GPU: auto of --kv-memory is divided among them"),
    ] = 1
    nodes_per_host: Annotated[
        PositiveInt,
        help_text(
            "Nodes of this host: auto of --kv-memory on a GPU divides the host's memory among "
            "them, and auto of --threads without native kernels its cores"
        ),
    ] = 1
    weight_cache_dir: Annotated[
        str,
        help_text(
            "Folder of packed weights, which the next start reads instead of the model's files, "
            "and of step times; auto: baton/weights in the user's cache folder; off: none"
        ),
    ] = "auto"
    weight_cache_size: Annotated[
        str,
        help_text(
            "What that folder holds at most, such as 32GiB or a share of its file system; "
            "the models used least recently are dropped"
        ),
    ] = "32GiB"
    block_size: Annotated[int, Meta(ge=1, le=256), help_text("Tokens of a KV block")] = 16
    max_num_seqs: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=1, le=4096)],
        help_text("Sequences that a node runs at once; auto: 64, on a GPU 256"),
    ] = "auto"
    max_batched_tokens: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=16, le=65536)],
        help_text(
            "Tokens that a node computes in one step; "
            "auto: at most 512, as few as reach 90% of the best measured rate of prompts; "
            "on a GPU 4096 for a prefill node and 2048 for a decode node"
        ),
    ] = "auto"
    max_step_ms: Annotated[
        Literal["auto"] | Annotated[float, Meta(ge=0, le=3_600_000)],
        help_text(
            "Milliseconds that a prompt chunk may make a step with running sequences last, "
            "beyond one block; 0: no bound, and prompts are not spread over steps that leave "
            "arithmetic idle; auto: 250, on a GPU no bound"
        ),
    ] = "auto"
    preemption: Annotated[
        Literal["most_blocks", "cheapest"],
        help_text(
            "Who of the lowest class gives way when blocks run out: most blocks held, "
            "or cheapest to resume"
        ),
    ] = "most_blocks"
    speculative: Annotated[
        Literal["none", "ngram", "draft"],
        help_text(
            "Speculative decoding, on CPUs; ngram: drafts come from the sequence itself "
            "(prompt lookup); draft: from --draft-model; outputs stay the same"
        ),
    ] = "none"
    draft_model: Annotated[
        str,
        help_text(
            "Smaller model with the same tokenizer: a folder or a hub id; "
            "for --speculative draft, on decode nodes"
        ),
    ] = ""
    speculative_tokens: Annotated[
        int,
        Meta(ge=1, le=32),
        help_text("Draft tokens of a sequence that a step verifies at most; the node adapts it"),
    ] = 8
    pool: Annotated[
        str, help_text("HOST:PORT of this host's pool; a node without one computes what it lacks")
    ] = ""
    pool_patience: Annotated[
        Seconds,
        help_text("Seconds a node waits for the first answer of its host's pool; then it computes"),
    ] = 0.05
    pool_publish_rate: Annotated[
        str, help_text("What a decode node copies into the pool in a second at most")
    ] = "256MiB"
    paced_prefill_us_per_token: Annotated[
        float, Meta(ge=0), help_text("Microseconds for each prompt token")
    ] = 50.0
    paced_step_ms: Annotated[float, Meta(ge=0), help_text("Milliseconds for each decode step")] = (
        2.0
    )
    paced_sequence_us: Annotated[
        float, Meta(ge=0), help_text("Microseconds of a decode step for each sequence")
    ] = 20.0
    paced_vocab_size: Annotated[PositiveInt, help_text("Token ids are below this")] = 32000
    paced_reread: Annotated[
        bool, help_text("Check the whole context again at every full block (tests)")
    ] = False
