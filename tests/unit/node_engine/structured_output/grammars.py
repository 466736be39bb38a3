"""Grammars and tokenizers for tests of the matchers."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from tokenizers import decoders, models, normalizers, trainers

from baton.structured_output.grammar_compiler import compile_grammar, load_grammar_tokenizer
from baton.types import GrammarKind, StructuredOutput
from node_engine.structured_output.token_masks import PendingMask
from tests.small_tokenizers import CORPUS, EOS_TOKEN, byte_level_tokenizer

EOS = 0
VOCAB = 400  # of the model: more than either tokenizer has
JSON = GrammarKind.JSON
SCHEMA = (
    '{"type":"object","properties":{"é":{"enum":[1,null]}},"required":["é"],'
    '"additionalProperties":false}'
)


def sentencepiece_tokenizer() -> tokenizers.Tokenizer:
    """BPE over text with byte fallback, as Llama 2 and Mistral use it."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = [EOS_TOKEN, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, '{"é": [1, 2], "a": null}'] * 4, trainer)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
}


@functools.cache
def save_tokenizer(kind: str) -> Path:
    file = Path(tempfile.mkdtemp()) / "tokenizer.json"
    file.write_text(TOKENIZERS[kind]().to_str())
    return file


@functools.cache
def grammar_tokenizer(kind: str = "byte_level") -> LLTokenizer:
    return load_grammar_tokenizer(save_tokenizer(kind), VOCAB, (EOS,))


def compile_text(text: str, kind: GrammarKind = JSON, tokenizer: str = "byte_level") -> LLMatcher:
    return compile_grammar(grammar_tokenizer(tokenizer), StructuredOutput(kind, text))


def request_mask(matcher: LLMatcher, excluded: tuple[int, ...], *, is_awaited: bool) -> PendingMask:
    return PendingMask(matcher, VOCAB, excluded)


def allowed_tokens(mask: PendingMask) -> list[int]:
    words = mask.wait_for_words()
    assert len(words) == -(-VOCAB // 32)
    bits: list[int] = np.flatnonzero(
        np.unpackbits(words.view(np.uint8), bitorder="little")
    ).tolist()
    return bits
