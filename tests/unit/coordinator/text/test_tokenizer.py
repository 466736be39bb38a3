"""Loading and encoding."""

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from baton.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from baton.limits import TextLimit
from coordinator.text import tokenizer_loader
from coordinator.text.byte_alphabet import longest_token_bytes
from coordinator.text.chat_template import ChatPrompt, ChatTemplate
from coordinator.text.special_token_escaper import SLICE_CHARS
from coordinator.text.text_workers import MAX_SHORT_BYTES, Result, TextWorkers
from coordinator.text.tokenizer import (
    DECODE_BYTES_PER_TOKEN,
    MAX_INLINE_BYTES,
    BoundedEncoder,
    HfTokenizer,
)
from tests.small_tokenizers import CHAT_TEMPLATE, EOS_TOKEN, byte_level_tokenizer


def byte_level_with_parts(**parts: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_level_tokenizer().to_str())
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def byte_level_with_token(token: AddedToken) -> tokenizers.Tokenizer:
    backend = byte_level_with_parts()
    backend.add_tokens([token])
    return backend


def word_level_with_unk() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def tokenizer_with_bos() -> HfTokenizer:
    """Token 0 begins every encoding."""
    backend = tokenizers.Tokenizer.from_str(byte_level_tokenizer().to_str())
    backend.post_processor = processors.TemplateProcessing(
        single=f"{EOS_TOKEN} $A", special_tokens=[(EOS_TOKEN, 0)]
    )
    return HfTokenizer(backend, bos=0)


async def test_special_tokens_are_added_as_configured_but_bos_never_twice() -> None:
    plain = byte_level_tokenizer().encode("hello").ids
    text = tokenizer_with_bos()
    assert await text.encode("hello") == (0, *plain)
    assert await text.encode(f"{EOS_TOKEN}hello") == (0, *plain)
    assert await text.encode("") == (0,)
    assert await HfTokenizer(byte_level_tokenizer(), bos=0).encode(f"{EOS_TOKEN}hello") == (
        0,
        *plain,
    )


async def test_truncation_and_padding_of_the_files_are_ignored() -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level_tokenizer().to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(await HfTokenizer(backend, bos=None).encode("abcdefgh" * 4)) == len(
        byte_level_tokenizer().encode("abcdefgh" * 4).ids
    )


async def test_long_prompts_encode_the_same_off_the_loop() -> None:
    prompt = "hello wörld 😀 " * (MAX_INLINE_BYTES // 4)
    assert await HfTokenizer(byte_level_tokenizer(), bos=None).encode(prompt) == tuple(
        byte_level_tokenizer().encode(prompt).ids
    )


@pytest.mark.parametrize(
    ("model", "engine", "told"), [("", "model", "the model has no"), ("x", "paced", "the paced")]
)
async def test_text_is_refused_without_a_tokenizer(model: str, engine: str, told: str) -> None:
    text = await tokenizer_loader.load_tokenizer(model, engine)
    with pytest.raises(InvalidRequest, match=f"prompt is text, but {told}.*send token ids"):
        await text.encode("hello")
    detokenizer = text.create_detokenizer()
    assert (detokenizer.append_tokens([1, 2]), detokenizer.flush()) == ("", "")


async def test_a_folder_without_tokenizer_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"{tmp_path.name} has no tokenizer files"):
        await (await tokenizer_loader.load_tokenizer(str(tmp_path), "model")).encode("hello")


async def test_a_folder_with_a_tokenizer(tmp_path: Path) -> None:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": EOS_TOKEN,
                "clean_up_tokenization_spaces": False,
            }
        )
    )
    text = await tokenizer_loader.load_tokenizer(str(tmp_path), "model")
    ids = await text.encode("hello wörld")
    assert ids == tuple(byte_level_tokenizer().encode("hello wörld").ids)
    detokenizer = text.create_detokenizer()
    assert detokenizer.append_tokens(ids) + detokenizer.flush() == "hello wörld"


async def test_broken_files_are_a_start_up_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        await tokenizer_loader.load_tokenizer(str(tmp_path), "model")


async def test_remote_code_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}'
    )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(ConfigError):
        await tokenizer_loader.load_tokenizer(str(tmp_path), "model")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("nested", [False, True])
async def test_token_offset_includes_its_leading_space(nested: bool) -> None:
    """Some files trim spaces off the places of tokens; text that is cut there would lose them."""
    backend = tokenizers.Tokenizer.from_str(byte_level_tokenizer().to_str())
    trimming = processors.ByteLevel(trim_offsets=True)
    backend.post_processor = processors.Sequence([trimming]) if nested else trimming
    text, prompt = HfTokenizer(backend, bos=None), "hello  wörld\n\n\thello"
    starts = [*await text.compute_token_offsets(prompt), len(prompt)]
    cut = [prompt[begin:end] for begin, end in itertools.pairwise(starts)]
    assert cut == [text.token_text(token) for token in await text.encode(prompt)]


async def test_token_without_text_starts_where_the_previous_ends() -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level_tokenizer().to_str())
    backend.post_processor = processors.TemplateProcessing(
        single=f"{EOS_TOKEN} $A {EOS_TOKEN}", special_tokens=[(EOS_TOKEN, 0)]
    )
    starts = await HfTokenizer(backend, bos=None).compute_token_offsets("hello a")
    assert (starts[0], starts[1], starts[-1]) == (0, 0, len("hello a"))


class ThreadRecordingWorkers(TextWorkers):
    """Workers that note on which threads work was done."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []

    async def run_work(self, work: Callable[[], Result], size: int) -> Result:
        def noted() -> Result:
            self.threads.append(threading.current_thread().name.partition("_")[0])
            return work()

        return await super().run_work(noted, size)


async def test_long_work_runs_off_the_event_loop() -> None:
    workers = ThreadRecordingWorkers()
    text = HfTokenizer(byte_level_tokenizer(), None, ChatTemplate(CHAT_TEMPLATE, {}), workers)
    many = MAX_INLINE_BYTES // DECODE_BYTES_PER_TOKEN + 1
    ids = await text.encode("hello")
    assert await text.get_token_strings(ids) == byte_level_tokenizer().encode("hello").tokens
    await text.encode("x" * MAX_INLINE_BYTES)
    assert workers.threads == []  # all was done here
    await text.encode("x" * (MAX_INLINE_BYTES + 1))
    await text.compute_token_offsets("x" * (MAX_INLINE_BYTES + 1))
    assert len(await text.get_token_strings(ids[:1] * many)) == many
    assert len(await text.decode(ids[:1] * many)) >= many
    assert len((await text.decode_with_offsets(ids[:1] * many))[1]) == many
    await text.encode_chat(ChatPrompt([{"role": "user", "content": "x"}] * 60))
    assert workers.threads == ["text-short"] * 6
    await text.encode("x" * (MAX_SHORT_BYTES + 1))
    await text.encode_chat(ChatPrompt([{"role": "user", "content": "ü" * MAX_SHORT_BYTES}]))
    assert workers.threads[6:] == ["text-long"] * 2


async def test_oversized_text_is_refused_before_encoding() -> None:
    """No token of this tokenizer has more than so many bytes."""
    backend = byte_level_tokenizer()
    longest = max(map(len, backend.get_vocab()))
    text, limit = (
        HfTokenizer(backend, bos=None, workers=(workers := ThreadRecordingWorkers())),
        TextLimit(10, "as it is"),
    )
    with pytest.raises(
        ContextLengthExceeded,
        match=rf"{10 * longest + 1} bytes of text: no token has more than {longest}.*as it is",
    ):
        await text.encode("x" * (10 * longest + 1), limit=limit)
    assert workers.threads == []
    assert len(await text.encode("x" * 10, limit=limit)) <= 10


class EncodeCountingBackend:
    """A tokenizer that notes how much text it is given."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.encoded_characters = 0

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        self.encoded_characters += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@pytest.mark.parametrize("kind", [byte_level_tokenizer, word_level_with_unk])
async def test_encoding_stops_at_twice_the_token_limit(
    kind: Callable[[], tokenizers.Tokenizer],
) -> None:
    """Also where one token may stand for any number of bytes."""
    backend = EncodeCountingBackend(kind())
    encoder = BoundedEncoder(cast(tokenizers.Tokenizer, backend))
    text = "日 " * (2 << 20)
    with pytest.raises(
        ContextLengthExceeded,
        match=r"prompt has more than 1000 tokens: the limit is 1000 .as it is",
    ):
        encoder.encode_text(text, TextLimit(1000, "as it is"), add_special_tokens=True)
    assert backend.encoded_characters == SLICE_CHARS
    assert (
        len(encoder.encode_text(text[:1000], TextLimit(1000, "as it is"), add_special_tokens=True))
        >= 500
    )


UNBOUNDED: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "a token for what is unknown": word_level_with_unk,
    "a normalizer": lambda: byte_level_with_parts(normalizer=normalizers.Strip()),
    "a pre-tokenizer that drops spaces": lambda: byte_level_with_parts(
        pre_tokenizer=pre_tokenizers.WhitespaceSplit()
    ),
    "a token that swallows spaces": lambda: byte_level_with_token(
        AddedToken("<mask>", lstrip=True)
    ),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_longest_token_is_unbounded(name: str) -> None:
    assert longest_token_bytes(UNBOUNDED[name]()) is None


def test_longest_token_is_bounded_for_byte_level() -> None:
    longest = longest_token_bytes(byte_level_tokenizer())
    assert longest == max(map(len, byte_level_tokenizer().get_vocab()))
    assert longest_token_bytes(byte_level_with_parts(normalizer=normalizers.NFC())) == 3 * longest
    assert longest_token_bytes(byte_level_with_token(AddedToken("<" + "ü" * 50 + ">"))) == 102
