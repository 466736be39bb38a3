"""Loading and encoding."""

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from baton.errors import ConfigError, InvalidRequest, TooLong
from baton.limits import TextLimit
from coordinator import tokenizer_files as tokenizer
from coordinator.bounded_encoding import SLICE, BoundedEncoder, longest_token
from coordinator.chat_template import ChatTemplate, Conversation
from coordinator.text_workers import INLINE_BYTES, SHORT_BYTES, Result, TextWorkers
from coordinator.tokenizer import TOKEN_BYTES, HfTokenizer
from tests.integration.front_text import CHAT_TEMPLATE, EOS, byte_level


def changed(**parts: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def added(token: AddedToken) -> tokenizers.Tokenizer:
    backend = changed()
    backend.add_tokens([token])
    return backend


def words_with_one_for_all_others() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def with_bos() -> HfTokenizer:
    """Token 0 begins every encoding."""
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    backend.post_processor = processors.TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, 0)])
    return HfTokenizer(backend, bos=0)


async def test_special_tokens_are_added_as_configured_but_bos_never_twice() -> None:
    plain = byte_level().encode("hello").ids
    text = with_bos()
    assert await text.encode("hello") == (0, *plain)
    assert await text.encode(f"{EOS}hello") == (0, *plain)
    assert await text.encode("") == (0,)
    assert await HfTokenizer(byte_level(), bos=0).encode(f"{EOS}hello") == (0, *plain)


async def test_truncation_and_padding_of_the_files_are_ignored() -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(await HfTokenizer(backend, bos=None).encode("abcdefgh" * 4)) == len(
        byte_level().encode("abcdefgh" * 4).ids
    )


async def test_long_prompts_encode_the_same_off_the_loop() -> None:
    prompt = "hello wörld 😀 " * (INLINE_BYTES // 4)
    assert await HfTokenizer(byte_level(), bos=None).encode(prompt) == tuple(byte_level().encode(prompt).ids)


@pytest.mark.parametrize(("model", "engine", "told"), [("", "model", "the model has no"), ("x", "paced", "the paced")])
async def test_without_a_tokenizer_text_is_refused_for_a_reason(model: str, engine: str, told: str) -> None:
    text = await tokenizer.load(model, engine)
    with pytest.raises(InvalidRequest, match=f"prompt is text, but {told}.*send token ids"):
        await text.encode("hello")
    detokenizer = text.detokenizer()
    assert (detokenizer.add([1, 2]), detokenizer.flush()) == ("", "")


async def test_a_folder_without_tokenizer_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"{tmp_path.name} has no tokenizer files"):
        await (await tokenizer.load(str(tmp_path), "model")).encode("hello")


async def test_a_folder_with_a_tokenizer(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        f'{{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "{EOS}", "clean_up_tokenization_spaces": false}}'
    )
    text = await tokenizer.load(str(tmp_path), "model")
    ids = await text.encode("hello wörld")
    assert ids == tuple(byte_level().encode("hello wörld").ids)
    detokenizer = text.detokenizer()
    assert detokenizer.add(ids) + detokenizer.flush() == "hello wörld"


async def test_broken_files_are_a_start_up_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        await tokenizer.load(str(tmp_path), "model")


async def test_remote_code_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}')
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(ConfigError):
        await tokenizer.load(str(tmp_path), "model")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("nested", [False, True])
async def test_a_token_starts_with_its_space_whatever_the_files_say(nested: bool) -> None:
    """Some files trim spaces off the places of tokens; text that is cut there would lose them."""
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    trimming = processors.ByteLevel(trim_offsets=True)
    backend.post_processor = processors.Sequence([trimming]) if nested else trimming
    text, prompt = HfTokenizer(backend, bos=None), "hello  wörld\n\n\thello"
    starts = [*await text.starts(prompt), len(prompt)]
    cut = [prompt[begin:end] for begin, end in itertools.pairwise(starts)]
    assert cut == [text.token_text(token) for token in await text.encode(prompt)]


async def test_what_stands_for_no_text_begins_where_it_stands() -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    backend.post_processor = processors.TemplateProcessing(single=f"{EOS} $A {EOS}", special_tokens=[(EOS, 0)])
    starts = await HfTokenizer(backend, bos=None).starts("hello a")
    assert (starts[0], starts[1], starts[-1]) == (0, 0, len("hello a"))


class WatchedWorkers(TextWorkers):
    """Workers that note on which threads work was done."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        def noted() -> Result:
            self.threads.append(threading.current_thread().name.partition("_")[0])
            return work()

        return await super().run(noted, size)


async def test_long_work_is_done_off_the_loop() -> None:
    workers = WatchedWorkers()
    text = HfTokenizer(byte_level(), None, ChatTemplate(CHAT_TEMPLATE, {}), workers)
    many = INLINE_BYTES // TOKEN_BYTES + 1
    ids = await text.encode("hello")
    assert await text.pieces(ids) == byte_level().encode("hello").tokens
    assert workers.threads == ["MainThread"] * 2
    workers.threads.clear()
    await text.encode("x" * (INLINE_BYTES + 1))
    await text.starts("x" * (INLINE_BYTES + 1))
    assert len(await text.pieces(ids[:1] * many)) == many
    assert len(await text.decode(ids[:1] * many)) >= many
    assert len((await text.describe(ids[:1] * many))[1]) == many
    await text.converse(Conversation([{"role": "user", "content": "x"}] * 60))
    assert workers.threads == ["text-short"] * 6
    await text.encode("x" * (SHORT_BYTES + 1))
    await text.converse(Conversation([{"role": "user", "content": "ü" * SHORT_BYTES}]))
    assert workers.threads[6:] == ["text-long"] * 2


async def test_a_text_that_cannot_fit_is_not_encoded() -> None:
    """No token of this tokenizer has more than so many bytes."""
    backend = byte_level()
    longest = max(map(len, backend.get_vocab()))
    text, limit = HfTokenizer(backend, bos=None, workers=(workers := WatchedWorkers())), TextLimit(10, "as it is")
    with pytest.raises(TooLong, match=rf"{10 * longest + 1} bytes of text: no token has more than {longest}.*as it is"):
        await text.encode("x" * (10 * longest + 1), limit=limit)
    assert workers.threads == []
    assert len(await text.encode("x" * 10, limit=limit)) <= 10


class CountedBackend:
    """A tokenizer that notes how much text it is given."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.characters = 0

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        self.characters += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@pytest.mark.parametrize("kind", [byte_level, words_with_one_for_all_others])
async def test_a_text_is_given_up_once_it_has_twice_the_tokens(kind: Callable[[], tokenizers.Tokenizer]) -> None:
    """Also where one token may stand for any number of bytes."""
    backend = CountedBackend(kind())
    encoder = BoundedEncoder(cast(tokenizers.Tokenizer, backend))
    text = "日 " * (2 << 20)
    with pytest.raises(TooLong, match=r"prompt has more than 1000 tokens: the limit is 1000 .as it is"):
        encoder.encode(text, TextLimit(1000, "as it is"), special=True)
    assert backend.characters == SLICE
    assert len(encoder.encode(text[:1000], TextLimit(1000, "as it is"), special=True)) >= 500


UNBOUNDED: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "a token for what is unknown": words_with_one_for_all_others,
    "a normalizer": lambda: changed(normalizer=normalizers.Strip()),
    "a pre-tokenizer that drops spaces": lambda: changed(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "a token that swallows spaces": lambda: added(AddedToken("<mask>", lstrip=True)),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_a_token_may_stand_for_any_length(name: str) -> None:
    assert longest_token(UNBOUNDED[name]()) is None


def test_the_longest_token_has_a_bound_where_all_bytes_are_kept() -> None:
    longest = longest_token(byte_level())
    assert longest == max(map(len, byte_level().get_vocab()))
    assert longest_token(changed(normalizer=normalizers.NFC())) == 3 * longest
    assert longest_token(added(AddedToken("<" + "ü" * 50 + ">"))) == 102
