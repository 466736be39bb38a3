"""Small seeded models and tokenizers for tests, and what transformers makes of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FamilyName = Literal["llama", "qwen2", "mistral", "qwen3", "mixed", "linear", "narrow"]
VOCAB_SIZE = 512
SLIDING_WINDOW = 37  # of mistral and mixed: not a multiple of a block
MIN_LOGIT_MARGIN = 1e-3  # a greedy choice by less than this may fall either way under rounding
EOS_TOKEN = "<|end|>"
_CORPUS = (
    "The quick brown fox jumps over the lazy dog while the decode node waits for the baton.",
    "Prefill reads the prompt; decode writes the answer one token at a time.",
    "def handoff(blocks): return [block for block in blocks if block.landed]",
    "A relay is won in the exchange zone: both run, neither waits, and nobody lets go too early.",
    "Once upon a time a small model answered every question with the same forty-eight words.",
    "Whoever carries it runs the straight alone; "
    "whoever waits watches the clock, the lane and the crowd.",
    "Rain fell on the stadium, yet every runner finished, "
    "tired, muddy, laughing and surprisingly fast.",
    "Twelve gardeners planted seventy tulips between the quiet harbour and the old observatory.",
    "Please write a short story about a lighthouse keeper, "
    "her telescope and an unexpected visitor.",
    "for index, value in enumerate(sorted(results)): print(index, value.upper(), end='')",
    "Ein Block hält sechzehn Token. Un bloc contient seize jetons. 一个块有十六个词元。",
)


def build_model(
    family: FamilyName,
    root: Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    eos_token_id: int | list[int] | None = None,
    seed: int = 0,
) -> Path:
    """A folder under `root` with random weights and a tokenizer, built once per arguments.

    `llama` has llama3 scaling and tied embeddings, `qwen2` biases and untied ones, `mistral` a
    window in every layer, `qwen3` normalised queries and keys and heads wider than hidden_size /
    heads. `mixed` is a Qwen2 with a window in every second layer, `linear` a Llama with linear
    scaling, `narrow` a Llama of 24 thin layers. In each, losing the KV of one layer of one block is
    likely to change a greedy answer.
    """
    eos = "none" if eos_token_id is None else str(eos_token_id).replace(" ", "")
    folder = root / f"{family}-{dtype}-{eos}-{seed}"
    if folder.exists():
        return folder
    building = folder.with_name(f"{folder.name}.building")
    torch.manual_seed(seed)
    model = _new_model(family, eos_token_id).to(getattr(torch, dtype))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    build_tokenizer(building)
    model.generation_config.eos_token_id = eos_token_id
    model.save_pretrained(building)
    return building.rename(folder)


def _new_model(family: FamilyName, eos_token_id: int | list[int] | None) -> PreTrainedModel:
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": eos_token_id,
    }
    small: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
    }
    if family == "llama":
        scaling: dict[str, Any] = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
        shape: dict[str, Any] = {
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "head_dim": 16,
        }
        heads: dict[str, Any] = {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "initializer_range": 0.15,
        }
        return LlamaForCausalLM(
            LlamaConfig(
                **common, **shape, **heads, rope_parameters=scaling, tie_word_embeddings=True
            )
        )
    if family == "narrow":
        shape = {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 24,
            "head_dim": 32,
        }
        return LlamaForCausalLM(LlamaConfig(**common, **shape, **small, tie_word_embeddings=True))
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    if family == "linear":
        scaling = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
        return LlamaForCausalLM(LlamaConfig(**common, **shape, **small, rope_parameters=scaling))
    if family == "mistral":
        return MistralForCausalLM(
            MistralConfig(**common, **shape, **small, sliding_window=SLIDING_WINDOW)
        )
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**common, **shape, **small, head_dim=24))
    if family == "mixed":
        windows: dict[str, Any] = {
            "use_sliding_window": True,
            "sliding_window": SLIDING_WINDOW,
            "max_window_layers": 0,
        }
        kinds = ["sliding_attention", "full_attention"]
        return Qwen2ForCausalLM(
            Qwen2Config(**common, **shape, **small, **windows, layer_types=kinds)
        )
    return Qwen2ForCausalLM(Qwen2Config(**common, **shape, **small, tie_word_embeddings=False))


def build_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of VOCAB entries, every byte among them, that AutoTokenizer
    loads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the corpus has too few pairs to merge"
    folder.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN).save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """What transformers' greedy search answers, and the least lead of a chosen token over the
    second."""

    tokens: tuple[int, ...]
    min_logit_margin: float


def load_reference_model(folder: Path) -> PreTrainedModel:
    """The folder as transformers runs it, in the dtype of its weights."""
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    classes = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
    cls: Any = next(each for each in classes if each.__name__ == kind)
    model: PreTrainedModel = cls.from_pretrained(folder, dtype="auto").eval()
    return model


def generate_reference(
    model: Path | PreTrainedModel, prompt: Sequence[int], max_tokens: int
) -> ReferenceOutput:
    """Greedy tokens of transformers. A folder is loaded for the call; pass a model to ask more
    often."""
    loaded: Any = load_reference_model(model) if isinstance(model, Path) else model
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        answer = loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
    best = torch.stack(answer.scores)[:, 0].float().topk(2, dim=-1).values
    return ReferenceOutput(
        tuple(answer.sequences[0, len(prompt) :].tolist()), float((best[:, 0] - best[:, 1]).min())
    )


@dataclass(frozen=True, slots=True)
class StablePrompt:
    """A prompt whose greedy continuation no rounding can change."""

    prompt: tuple[int, ...]
    reference_tokens: tuple[int, ...]
    min_logit_margin: float


def find_stable_prompts(
    model: Path | PreTrainedModel,
    lengths: Sequence[int],
    max_tokens: int = 48,
    *,
    seed: int = 0,
    shared_prefix: Sequence[int] = (),
) -> list[StablePrompt]:
    """One random prompt per length, all beginning with `shared_prefix` as far as they reach, each
    with a margin above MARGIN along `max_tokens` tokens. Raises LookupError when twenty tries find
    none."""
    loaded: Any = load_reference_model(model) if isinstance(model, Path) else model
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in lengths:
        for _ in range(20):
            drawn = torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
            prompt = (*shared_prefix, *drawn[len(shared_prefix) :])[:length]
            answer = generate_reference(loaded, prompt, max_tokens)
            if answer.min_logit_margin > MIN_LOGIT_MARGIN:
                found.append(StablePrompt(prompt, answer.tokens, answer.min_logit_margin))
                break
        else:
            raise LookupError(
                f"no prompt of {length} tokens has a margin above {MIN_LOGIT_MARGIN}: "
                "try another seed"
            )
    return found
