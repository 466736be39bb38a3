"""Model folders without weights, for engines and servers that make random ones.

The shape is that of a Llama, and the tokenizer has a word for every id of the vocabulary, so that
each token of an answer is text.
"""

import json
import string
from pathlib import Path
from typing import Any

# The config.json of Llama 3.1 8B.
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
LLAMA_TINY: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_scaling": None,
    "torch_dtype": "float32",
    "bos_token_id": 510,
    "eos_token_id": 511,
}
LLAMA_CONFIGS = {"8b": LLAMA_8B, "tiny": LLAMA_TINY}


def write_llama_folder(folder: Path, config: dict[str, Any]) -> Path:
    """Write config.json and a tokenizer to a new folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(folder, config)
    return folder


def _write_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """Write a byte-level BPE without merges: the bytes first, then a word for each other id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    for number in range(len(alphabet), config["vocab_size"]):
        vocabulary[f"\u0120{_spell_word(number)}"] = number  # U+0120 stands for a space
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _spell_word(number: int) -> str:
    """Letters that no other number has: its digits in the base of the alphabet."""
    letters = string.ascii_lowercase
    word = ""
    while True:
        word = letters[number % len(letters)] + word
        number //= len(letters)
        if not number:
            return word
