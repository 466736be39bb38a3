"""Small seeded random models as Hugging Face folders, which the benchmarks serve."""

import argparse
import asyncio
import importlib
import inspect
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_END_TOKEN = "<|end|>"
_INITIALIZER_RANGE = 0.1
_SMALL = 0.01  # times what a layer adds, so that the embedding of the last token prevails
_SUCCESSOR_LOGIT = 9.0  # greedily always drawn, and at temperature 2 hardly ever
_TEXT_MODULES: tuple[ModuleType, ...] = (
    argparse,
    asyncio,
    inspect,
    json,
    shutil,
    statistics,
    tempfile,
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Geometry of a Llama. `has_eos` says whether the tokenizer's end token stops an answer.

    With `passage_tokens`, greedy outputs repeat a passage of so many tokens, and are nearly random
    at temperature 2.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    has_eos: bool
    dtype: str = "float32"  # of the file
    passage_tokens: int = 0


DEMO_SHAPE = ModelShape(256, 704, 8, 8, 4, 32, 2048, 4096, has_eos=True)
# 24 layers give a hand-off many steps to hide behind, and little arithmetic in each keeps it from
# hiding much.
NARROW_SHAPE = ModelShape(128, 256, 24, 4, 2, 32, 512, 2048, has_eos=False)
# Of the size of Qwen2.5-0.5B: 387 million parameters, 12 KiB of KV a token, and seconds to compute
# 4k tokens on a CPU.
SMALL_SHAPE = ModelShape(896, 4864, 24, 14, 2, 64, 32768, 8192, has_eos=False, dtype="bfloat16")


def build_random_model(folder: Path, shape: ModelShape, seed: int = 0) -> Path:
    """Write the model and a byte-level BPE tokenizer to `folder` unless it exists, atomically."""
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        complete = Path(scratch, folder.name)
        _write_tokenizer(complete, shape)
        _write_weights(complete, shape, seed)
        if folder.exists():  # left by an interrupted process; the new one is complete
            shutil.rmtree(folder)
        os.rename(complete, folder)
    return folder


def _write_weights(folder: Path, shape: ModelShape, seed: int) -> None:
    import torch

    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.context,
        initializer_range=_INITIALIZER_RANGE,  # wide enough that answers depend on the prompt
        tie_word_embeddings=not shape.passage_tokens,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=0 if shape.has_eos else None,
    )
    torch.manual_seed(seed)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM(config)
    if shape.passage_tokens:
        with torch.no_grad():
            _repeat_passages(model, shape)
    model.to(getattr(torch, shape.dtype)).save_pretrained(folder)


def _repeat_passages(model: Any, shape: ModelShape) -> None:
    """Make the successor of a token the most likely one, whatever precedes the token.

    Tokens with successive ids are a passage, whose last token is followed by its first one.
    """
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(_SMALL)
        layer.mlp.down_proj.weight.mul_(_SMALL)
    size = shape.passage_tokens
    before = [
        token // size * size + (token - 1) % size if token // size < shape.vocabulary // size else 0
        for token in range(shape.vocabulary)
    ]
    scale = _SUCCESSOR_LOGIT / (_INITIALIZER_RANGE * shape.hidden)
    model.lm_head.weight.copy_(scale * model.model.embed_tokens.weight[before])


def _write_tokenizer(folder: Path, shape: ModelShape) -> None:
    """Train a tokenizer on the standard library's documentation; the end token has id 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocabulary,
        special_tokens=[_END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    folder.mkdir()
    fast = importlib.import_module("transformers").PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token=_END_TOKEN).save_pretrained(folder)


def _texts() -> Iterator[str]:
    for module in _TEXT_MODULES:
        yield module.__doc__ or ""
        yield from (
            text for _, member in sorted(vars(module).items()) if (text := inspect.getdoc(member))
        )
