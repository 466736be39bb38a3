"""The tokenizer for grammars is read once: while a node starts, or for the first constraint."""

from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.process.clock import FakeClock
from node_engine.structured_output import constraint_factory
from node_engine.structured_output.constraint_factory import ConstraintFactory


def make_factory(tokenizer: Path) -> ConstraintFactory:
    return ConstraintFactory(
        tokenizer, vocab_size=8, eos_token_ids=(0,), max_grammars=1, clock=FakeClock()
    )


def test_the_tokenizer_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    tokenizer = object()

    def load(file: Path, *_: object) -> object:
        reads.append(file)
        return tokenizer

    monkeypatch.setattr(constraint_factory, "load_grammar_tokenizer", load)
    factory = make_factory(tmp_path)
    assert reads == []
    factory.start_tokenizer_loading()
    factory.wait_for_tokenizer()
    assert reads == [tmp_path]
    assert [factory._get_tokenizer() for _ in range(2)] == [tokenizer] * 2
    assert reads == [tmp_path]
    factory.close()


def test_whatever_prevents_reading_the_tokenizer_fails_every_constraint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise RuntimeError("panicked")

    monkeypatch.setattr(constraint_factory, "load_grammar_tokenizer", load)
    factory = make_factory(tmp_path)
    factory.start_tokenizer_loading()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="panicked"):
            factory._get_tokenizer()
    factory.close()


def test_a_tokenizer_that_cannot_be_read_fails_every_constraint(tmp_path: Path) -> None:
    factory = make_factory(tmp_path / "tokenizer.json")
    factory.start_tokenizer_loading()
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot be read"):
            factory._get_tokenizer()
    factory.close()
