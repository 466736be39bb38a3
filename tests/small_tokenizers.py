"""Small tokenizers, trained on the spot."""

import functools

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from coordinator.text.byte_alphabet import CHAR_TO_BYTE
from coordinator.text.chat_template import ChatTemplate
from coordinator.text.tokenizer import HfTokenizer

EOS_TOKEN = "<|end|>"
CORPUS = [
    "hello world, hello hello",
    "héllo wörld",
    "日本語のテキスト",
    "😀😀 🎉",
    "a b  c\n\n\td",
] * 4


BYTE_CHARS = {byte: char for char, byte in CHAR_TO_BYTE.items()}


@functools.cache
def byte_level_tokenizer(vocab_size: int = 320) -> tokenizers.Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen use it. Token 0 is special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[EOS_TOKEN],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def hello_tokenizer() -> HfTokenizer:
    return HfTokenizer(byte_level_tokenizer(), bos=None)


def byte_tokens(data: bytes) -> list[int]:
    """One token for each byte."""
    return [token_id(byte_level_tokenizer(), BYTE_CHARS[byte]) for byte in data]


def token_id(tokenizer: tokenizers.Tokenizer, piece: str) -> int:
    """The id of a piece that the vocabulary has."""
    found = tokenizer.token_to_id(piece)
    assert found is not None, f"{piece!r} is not in the vocabulary"
    return found


CHAT_TEMPLATE = (
    "{{ opening | default('') }}{% for message in messages %}{{ '<' + message.role + '>' }}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ (message.name + ': ' if message.name else '') + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_tokenizer() -> HfTokenizer:
    return HfTokenizer(
        byte_level_tokenizer(),
        bos=None,
        template=ChatTemplate(CHAT_TEMPLATE, {"eos_token": EOS_TOKEN}),
    )


def expected_ids(text: str) -> tuple[int, ...]:
    return tuple(byte_level_tokenizer().encode(text).ids)
