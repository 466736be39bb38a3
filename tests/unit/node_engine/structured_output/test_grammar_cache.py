"""Compiled grammars are kept within bounds, and compiled once at a time."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from llguidance import LLMatcher

from baton.errors import InvalidRequest
from baton.process.clock import FakeClock
from baton.structured_output.grammar_compiler import compile_grammar
from baton.types import GrammarKind, StructuredOutput
from node_engine.structured_output.grammar_cache import IDLE_SECONDS, GrammarCache
from tests.unit.node_engine.structured_output.grammars import grammar_tokenizer


def regex(text: str) -> StructuredOutput:
    return StructuredOutput(GrammarKind.REGEX, text)


class CountingCache(GrammarCache):
    def __init__(self, max_entries: int = 2) -> None:
        self.compiled: list[str] = []
        self.clock = FakeClock()
        super().__init__(self.compile, max_entries, self.clock)

    def compile(self, grammar: StructuredOutput) -> LLMatcher:
        self.compiled.append(grammar.text)
        return compile_grammar(grammar_tokenizer(), grammar)


def test_each_caller_gets_a_matcher_in_the_initial_state() -> None:
    cache = CountingCache()
    (a,) = grammar_tokenizer().tokenize_str("a")
    for _ in range(3):
        assert cache.get_matcher(regex("a")).consume_token(a)
    assert (cache.compiled, cache.num_hits, cache.num_misses) == (["a"], 2, 1)


def test_the_least_recently_used_grammar_is_dropped() -> None:
    cache = CountingCache()
    for text in "abac":
        cache.get_matcher(regex(text))
    assert len(cache) == 2
    cache.get_matcher(regex("a"))
    assert cache.compiled == ["a", "b", "c"]
    cache.get_matcher(regex("b"))
    assert cache.compiled == ["a", "b", "c", "b"]


def test_grammars_that_come_once_do_not_displace_those_in_use() -> None:
    cache = CountingCache(max_entries=8)
    in_use = "abcd"
    for text in in_use * 2 + "".join(map(chr, range(0x100, 0x140))) + in_use:
        cache.get_matcher(regex(text))
    assert [cache.compiled.count(text) for text in in_use] == [1, 1, 1, 1]
    assert len(cache) == 8
    for text in "efghijkl" * 2:  # others take their places in the end
        cache.get_matcher(regex(text))
        cache.get_matcher(regex(text))
    assert [cache.compiled.count(text) for text in "efghijkl"] == [1] * 8


def test_idle_grammars_are_dropped_when_another_is_added() -> None:
    cache = CountingCache(max_entries=10)
    for text in "ab":
        cache.get_matcher(regex(text))
    cache.clock.advance(IDLE_SECONDS + 1)
    cache.get_matcher(regex("b"))
    cache.get_matcher(regex("c"))
    assert len(cache) == 2


def test_equal_texts_of_other_kinds_are_other_grammars() -> None:
    cache = CountingCache()
    cache.get_matcher(regex('["a"]'))
    cache.get_matcher(StructuredOutput(GrammarKind.CHOICE, '["a"]'))
    assert len(cache.compiled) == 2


def test_a_grammar_is_compiled_once_for_all_that_wait() -> None:
    started, proceed = threading.Event(), threading.Event()

    class SlowCache(CountingCache):
        def compile(self, grammar: StructuredOutput) -> LLMatcher:
            started.set()
            assert proceed.wait(60)
            return super().compile(grammar)

    cache = SlowCache()
    with ThreadPoolExecutor(4) as threads:
        made = [threads.submit(cache.get_matcher, regex("a")) for _ in range(4)]
        assert started.wait(60)
        proceed.set()
        assert all(not one.result().is_error() for one in made)
    assert cache.compiled == ["a"]


def test_a_grammar_that_fails_is_not_kept() -> None:
    cache = CountingCache()
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            cache.get_matcher(regex("("))
    assert (len(cache), cache.compiled) == (0, ["(", "("])


def test_a_dropped_grammar_is_compiled_again() -> None:
    cache = CountingCache()
    cache.get_matcher(regex("a"))
    cache.drop_grammar(regex("a"))
    cache.get_matcher(regex("a"))
    assert cache.compiled == ["a", "a"]
