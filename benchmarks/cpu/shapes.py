"""Models that the CPU benchmarks measure: named shapes without weights, or a folder of the user."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.clusters.llama_folders import write_llama_folder
from benchmarks.device.section_run import MeasuredModel
from node_engine.model.config.model_config import load_model_config

_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 64,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# 24 million parameters: small enough that the caches of a server's CPU hold much of it.
TINY: dict[str, Any] = _COMMON | {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}
# 387 million parameters, the size of Qwen2.5-0.5B: every step reads its weights from memory.
SMALL: dict[str, Any] = _COMMON | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "vocab_size": 32768,
    "tie_word_embeddings": True,
}
SHAPES = {"tiny": TINY, "small": SMALL}
MODEL_HELP = f"{', '.join(SHAPES)}, with random weights, or a model folder"


@contextmanager
def open_model(name: str) -> Iterator[MeasuredModel]:
    """Yield the model of a named shape or of a folder. Raises ValueError if there is neither.

    A folder that has no weights gets random ones.
    """
    if name in SHAPES:
        with TemporaryDirectory(prefix="baton-bench-") as folder:
            yield _describe_folder(write_llama_folder(Path(folder, name), SHAPES[name]))
    elif Path(name, "config.json").exists():
        yield _describe_folder(Path(name))
    else:
        raise ValueError(
            f"--model {name!r} is neither a folder with a config.json nor {MODEL_HELP}"
        )


def _describe_folder(folder: Path) -> MeasuredModel:
    load_format = "auto" if any(folder.glob("*.safetensors")) else "dummy"
    return MeasuredModel(folder, load_model_config(folder), load_format)


def read_vocabulary_size(folder: Path) -> int:
    """Return the number of token ids of a model folder."""
    size: int = json.loads((folder / "config.json").read_text())["vocab_size"]
    return size
