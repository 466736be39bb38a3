"""Makes the grammar states of a node's sequences, on threads of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from baton.errors import GrammarFailed
from baton.process import log
from baton.process.clock import Clock
from baton.process.thread_priority import lower_thread_priority
from baton.structured_output.grammar_compiler import compile_grammar, load_grammar_tokenizer
from baton.types import AttemptSpec, StructuredOutput
from node_engine.core.sequences.stop_rules import unwanted_ends
from node_engine.structured_output.grammar_cache import GrammarCache
from node_engine.structured_output.grammar_state import GrammarState
from node_engine.structured_output.token_masks import MaskThread, PendingMask

_TOKENS_AT_ONCE = 512  # about 2 ms, in which llguidance holds Python's lock
_THREADS = 2  # so that a slow grammar does not delay all others


class ConstraintFactory:
    """Makes the constraints of one node's sequences. Thread-safe."""

    def __init__(
        self,
        tokenizer_file: Path,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_grammars: int,
        clock: Clock,
    ) -> None:
        """The tokenizer is read by `start_tokenizer_loading`, or for the first constraint.

        This takes up to half a second, in which Python's lock is held.
        """
        # Grammars give way to the steps of this node.
        self._executor = ThreadPoolExecutor(_THREADS, "grammar", lower_thread_priority)
        self._load = partial(load_grammar_tokenizer, tokenizer_file, vocab_size, eos_token_ids)
        # Not one of `_executor`: a thread of low priority would keep Python's lock for longer.
        self._loader = threading.Thread(target=self._read_tokenizer, name="tokenizer", daemon=True)
        self._load_lock = threading.Lock()
        self._tokenizer: Future[LLTokenizer] | None = None  # None until it is read
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._masks = MaskThread()
        self.cache = GrammarCache(self._compile_grammar, max_grammars, clock)

    def start_tokenizer_loading(self) -> None:
        """Start a thread that reads the model's tokenizer.json for llguidance."""
        self._loader.start()

    def wait_for_tokenizer(self) -> None:
        """Wait for the thread of `start_tokenizer_loading`.

        It holds Python's lock while it reads, which would stop all requests. Does not raise: if the
        tokenizer cannot be read, every constraint fails.
        """
        self._loader.join()

    def _get_tokenizer(self) -> LLTokenizer:
        """Read the tokenizer the first time. Raises ConfigError, and what llguidance raises."""
        return self._read_tokenizer().result()

    def _read_tokenizer(self) -> "Future[LLTokenizer]":
        with self._load_lock:
            if self._tokenizer is None:
                self._tokenizer = Future()
                try:
                    self._tokenizer.set_result(self._load())
                except BaseException as error:  # a panic of llguidance, too
                    self._tokenizer.set_exception(error)
                    log.get_logger("grammar").error(
                        "structured output is not available", **log.get_error_fields(error)
                    )
        return self._tokenizer

    def submit_work(self, work: AttemptSpec) -> "Future[GrammarState]":
        """Begin to make the constraint of an attempt. The future raises BatonError."""
        return self._executor.submit(self.make_constraint, work)

    def make_constraint(self, work: AttemptSpec) -> GrammarState:
        """Return the grammar's state after the tokens that were emitted. Raises BatonError.

        The first mask takes longest, because it builds tables of the grammar. So it is computed
        here, and no step waits for it.
        """
        grammar = work.request.sampling.structured_output
        assert grammar is not None
        matcher = self.cache.get_matcher(grammar)
        emitted = list(work.emitted_token_ids)
        for first in range(0, len(emitted), _TOKENS_AT_ONCE):
            tokens = emitted[first : first + _TOKENS_AT_ONCE]
            if matcher.try_consume_tokens(tokens) != len(tokens):
                raise GrammarFailed(
                    "the tokens that were emitted before break the output's grammar"
                )
        ends_of_text = tuple(sorted(set(self._get_tokenizer().eos_tokens) - self._eos_token_ids))
        return GrammarState(
            matcher,
            self._request_mask,
            excluded_token_ids=ends_of_text,
            first_mask=None
            if matcher.is_stopped()
            else self._compute_first_mask(matcher, work, ends_of_text),
            on_failed=partial(self.cache.drop_grammar, grammar),
        )

    def close(self) -> None:
        """Cancel grammars that wait to be compiled, and end the threads.

        Returns when they have finished what they had begun. Idempotent.
        """
        self._executor.shutdown(cancel_futures=True)
        self._masks.close()

    def set_awaited_mask_callback(self, callback: Callable[[], None]) -> None:
        """`callback` is called on another thread when a sequence may join steps again."""
        self._masks.on_awaited_mask = callback

    def _compute_first_mask(
        self, matcher: LLMatcher, work: AttemptSpec, ends_of_text: tuple[int, ...]
    ) -> PendingMask:
        sampling, num_output_tokens = work.request.sampling, len(work.emitted_token_ids)
        excluded = unwanted_ends(sampling, self._eos_token_ids, num_output_tokens)
        mask = PendingMask(matcher, self._vocab_size, (*ends_of_text, *excluded))
        mask.compute_ahead()
        return mask

    def _request_mask(
        self, matcher: LLMatcher, excluded: tuple[int, ...], *, is_awaited: bool
    ) -> PendingMask:
        return self._masks.request_mask(matcher, self._vocab_size, excluded, is_awaited=is_awaited)

    def _compile_grammar(self, grammar: StructuredOutput) -> LLMatcher:
        return compile_grammar(self._get_tokenizer(), grammar)

    def counters(self) -> dict[str, float]:
        """Counters of the node, by metric name."""
        cache = self.cache
        return {
            'baton_grammar_lookups_total{result="hit"}': float(cache.num_hits),
            'baton_grammar_lookups_total{result="miss"}': float(cache.num_misses),
            "baton_grammar_compile_seconds_total": cache.compile_seconds,
        }
