"""A mock engine: it waits as long as a cost model says, and its tokens are a hash of the context.

It stands in for a model where the protocol is tested and the arithmetic does not matter. Its KV is
real bytes in the real arena. The record of the token at position p is

    word 0      token id
    words 1, 2  digest of the context up to p:  digest_p = digest_{p-1} + mix(token, p)  mod 2**64
    words 3..   a pattern of both and of the place: layer, K or V, head, word

The next token is a hash of the digest *read from the arena*, so that it depends on the whole
context, as attention does. KV that was never written, belongs to other tokens, positions or layers,
or has a flipped bit does not match its pattern; the mismatch goes into the digest. **Wrong KV
therefore gives wrong tokens, not an error**, as with a model: who compares the tokens with those of
a correct engine detects it. The whole context is read when a sequence is first seen (after a
hand-off or a cache hit) or does not continue where it stopped. Other steps read its last block only
or, with `reread`, all of it whenever a block is full: that detects writes into a block after it was
checked.

Logprobs are derived from the same digest, so that they are deterministic, and wrong where KV is
wrong: the token that the digest gives is the most likely, the following token ids are next in
order, and each is e**(-1/8) times as likely as the one before. They do not add up to 1. Of the
sampling fields only `forbidden_token_ids` changes a token.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError
from baton.kv.blocks import KVLayout
from baton.models.model_identity import PACED_IMPLEMENTATION, UNQUANTIZED, ModelIdentity
from baton.process.clock import Clock, monotonic_clock
from baton.types import BlockIndex, TokenLogprobs
from node_engine.core.step.engine import (
    CacheLimits,
    ComputeDevice,
    LayerCallback,
    ModelSize,
    make_completed_save,
)
from node_engine.core.step.step_batch import (
    PromptLogprobsSpec,
    SampleSpec,
    SequenceId,
    SequenceSlice,
    SliceResult,
    StepBatch,
    gather_slice_results,
    list_sampled_rows,
)
from node_engine.paced.costs import PacedCosts
from node_engine.paced.token_hash import Ints, Longs, draw_token, mix, mix_tokens, token_logprobs

PACED_LAYOUT = KVLayout(num_layers=4, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")

_Words = npt.NDArray[np.uint32]


class PacedEngine:
    """An `Engine` without a model; see the module."""

    model_size: ModelSize | None = None

    def __init__(
        self,
        costs: PacedCosts | None = None,
        *,
        layout: KVLayout = PACED_LAYOUT,
        vocab_size: int = 32000,
        eos_token_ids: tuple[int, ...] = (0,),
        eos_probability: float = 0.0,
        max_model_len: int = 8192,
        reread: bool = False,
        clock: Clock = monotonic_clock,
        wait: Callable[[float], None] | None = None,
    ) -> None:
        """`wait(seconds)` is called at most once per layer, for the rest of the layer's time.

        `eos_probability` is the probability that EOS ends an output at each token.
        """
        if layout.dtype != "float32" or layout.head_dim < 4:
            raise ConfigError(f"the paced engine needs float32 and head_dim >= 4, not {layout}")
        self._costs = costs if costs is not None else PacedCosts()
        self._layout = layout
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._eos_probability = eos_probability
        self._max_model_len = max_model_len
        self._reread = reread
        self._clock = clock
        self._wait = wait if wait is not None else _wait
        self.compute_device = ComputeDevice(threads=1)
        self._pattern_words = _pattern_words(layout)
        self._kv: _Words = np.zeros(0, np.uint32)
        # Position after the last slice, by sequence.
        self._next_positions: OrderedDict[SequenceId, int] = OrderedDict()
        self._max_sequences = 0

    @property
    def layout(self) -> KVLayout:
        return self._layout

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def model_digest(self) -> bytes:
        spelled = f"paced 1 {self._vocab_size} {self._eos} {self._eos_probability}"
        return hashlib.sha256(spelled.encode()).digest()

    @property
    def model_identity(self) -> ModelIdentity:
        digest, layout = self.model_digest.hex(), self._layout
        return ModelIdentity(
            PACED_IMPLEMENTATION,
            digest,
            layout.dtype,
            UNQUANTIZED,
            layout,
            self._vocab_size,
            self._eos,
        )

    @property
    def cache_limits(self) -> CacheLimits:
        return CacheLimits()

    def bind_cache(self, arena: memoryview, num_blocks: int) -> None:
        """View the memory as words [block][layer][k|v][kv_head][token][word]."""
        layout = self._layout
        reach = max(num_blocks, arena.nbytes // layout.block_bytes)
        shape = (
            reach,
            layout.num_layers,
            2,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
        )
        self._kv = np.frombuffer(arena, np.uint32, reach * layout.block_bytes // 4).reshape(shape)
        self._max_sequences = num_blocks  # a live sequence has at least one block
        self._next_positions.clear()

    def load_blocks(self, blocks: Sequence[BlockIndex]) -> None:
        """Steps compute in the arena itself."""

    def save_blocks(self, blocks: Sequence[BlockIndex]) -> Future[None]:
        """Steps compute in the arena itself."""
        return make_completed_save()

    def warm_up(
        self, max_batched_tokens: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Does nothing: the first step takes no longer than the others."""

    def run(
        self, batch: StepBatch, on_layer: LayerCallback | None = None
    ) -> tuple[SliceResult, ...]:
        started, seconds = self._clock(), self._costs.compute_step_seconds(batch)
        for source, destination in batch.block_copies:
            self._kv[destination] = self._kv[source]
        before = self._read_context_digests(batch.slices)
        new = self._locate_tokens(
            batch.slices,
            [(slice_.start, slice_.start + len(slice_.token_ids)) for slice_ in batch.slices],
        )
        tokens = np.array(
            [token for slice_ in batch.slices for token in slice_.token_ids], np.uint64
        )
        digests = before[new.slice_indices] + new.running_sums(mix_tokens(tokens, new.positions))
        records = self._build_records(tokens, digests)
        for layer in range(self._layout.num_layers):
            self._kv[:, layer][new.blocks, :, :, new.offsets] = records[:, layer]
            remaining = started + seconds * (layer + 1) / self._layout.num_layers - self._clock()
            if remaining > 0:
                self._wait(remaining)
            if on_layer is not None:
                on_layer(layer)
        rows, specs = list_sampled_rows(batch.slices)
        sampled = map(self._build_result, digests[rows].tolist(), specs)
        results = gather_slice_results(batch.slices, sampled)
        for index, slice_ in enumerate(batch.slices):
            if slice_.logprobs_spec is not None:
                after = digests[new.starts[index] : new.ends[index]].tolist()
                results[index] = results[index]._replace(
                    prompt_logprobs=self._compute_logprobs_of_targets(
                        after, slice_.start, slice_.logprobs_spec
                    )
                )
        return tuple(results)

    def _build_result(self, digest: int, sample: SampleSpec) -> SliceResult:
        token, top = (
            self._draw_token(digest, sample.position, sample.forbidden_token_ids),
            sample.params.logprobs,
        )
        return SliceResult(
            token,
            None if top is None else self._token_logprobs(digest, sample.position, token, top),
        )

    def _compute_logprobs_of_targets(
        self, digests: Sequence[int], start: int, scoring: PromptLogprobsSpec
    ) -> tuple[TokenLogprobs, ...]:
        """Logprobs of the target tokens; `digests` are those from position `start` on."""
        return tuple(
            self._token_logprobs(digest, position, token, scoring.top_logprobs)
            for position, (digest, token) in enumerate(
                zip(digests, scoring.target_token_ids, strict=False), start + 1
            )
        )

    def _draw_token(self, digest: int, position: int, forbidden: Sequence[int] = ()) -> int:
        return draw_token(
            digest, position, self._vocab_size, self._eos, self._eos_probability, forbidden
        )

    def _token_logprobs(self, digest: int, position: int, token: int, top: int) -> TokenLogprobs:
        return token_logprobs(
            digest, self._draw_token(digest, position), token, top, self._vocab_size
        )

    # KV

    def _read_context_digests(self, slices: Sequence[SequenceSlice]) -> Longs:
        """Digest of the tokens before each slice, as read from the arena.

        If any word that was read is wrong, the digest is a different number, so that everything
        written afterwards is wrong as well.
        """
        before = np.zeros(len(slices), np.uint64)
        old = self._locate_tokens(
            slices, [(self._first_unread_position(slice_), slice_.start) for slice_ in slices]
        )
        read = old.ends > old.starts
        if not read.any():
            return before
        records = self._kv[old.blocks, :, :, :, old.offsets]
        tokens = records[:, 0, 0, 0, 0].astype(np.uint64)
        digests = records[:, 0, 0, 0, 1].astype(np.uint64) | records[:, 0, 0, 0, 2].astype(
            np.uint64
        ) << np.uint64(32)
        pattern = ((records ^ self._build_records(tokens, digests)) * self._pattern_words).sum(
            (1, 2, 3, 4), np.uint64
        )
        previous = np.roll(digests, 1)
        previous[old.starts[read]] = 0
        chain = digests - previous - mix_tokens(tokens, old.positions)
        begun = old.starts[read]
        chain[begun[old.positions[begun] > 0]] = 0  # what precedes was read in an earlier step
        wrong = pattern + chain
        damage = old.running_sums(np.where(wrong == 0, np.uint64(0), mix(wrong)))
        before[read] = (digests + damage)[old.ends[read] - 1]
        return before

    def _first_unread_position(self, slice_: SequenceSlice) -> int:
        """First position to read: in the last block if the sequence continues, else 0."""
        known = self._next_positions.get(slice_.sequence_id) == slice_.start > 0
        if self._reread and slice_.start % self._layout.block_size == 0:
            known = False
        self._next_positions[slice_.sequence_id] = slice_.start + len(slice_.token_ids)
        self._next_positions.move_to_end(slice_.sequence_id)
        if len(self._next_positions) > self._max_sequences:
            self._next_positions.popitem(last=False)
        return (
            (slice_.start - 1) // self._layout.block_size * self._layout.block_size if known else 0
        )

    def _build_records(self, tokens: Longs, digests: Longs) -> _Words:
        """The correct arena records of these tokens: [token][layer][k|v][kv_head][word]."""
        base = mix(digests ^ mix(tokens))
        records = (
            (base[:, None, None, None, None] ^ self._pattern_words) * self._pattern_words
            >> np.uint64(32)
        ).astype(np.uint32)
        records[..., 0] = tokens.astype(np.uint32)[:, None, None, None]
        records[..., 1] = digests.astype(np.uint32)[:, None, None, None]
        records[..., 2] = (digests >> np.uint64(32)).astype(np.uint32)[:, None, None, None]
        return records

    def _locate_tokens(
        self, slices: Sequence[SequenceSlice], spans: Sequence[tuple[int, int]]
    ) -> "_TokenPlaces":
        """Locate the tokens at positions [begin, end) of each slice's sequence in the arena."""
        size = self._layout.block_size
        positions = [np.arange(begin, end) for begin, end in spans]
        blocks = [
            np.array(slice_.block_table[begin // size : -(-end // size)], np.int64)[
                span // size - begin // size
            ]
            for slice_, span, (begin, end) in zip(slices, positions, spans, strict=True)
        ]
        lengths = np.array([end - begin for begin, end in spans])
        flat = np.concatenate(positions)
        ends = np.cumsum(lengths)
        owner = np.repeat(np.arange(len(spans)), lengths)
        return _TokenPlaces(owner, flat, np.concatenate(blocks), flat % size, ends - lengths, ends)


@dataclass(frozen=True, slots=True)
class _TokenPlaces:
    """Where the tokens of several slices are in the arena, all slices concatenated."""

    slice_indices: Ints  # per token
    positions: Ints  # per token, in its sequence
    blocks: Ints  # per token
    offsets: Ints  # per token, in its block
    starts: Ints  # per slice, in the concatenation
    ends: Ints  # per slice, in the concatenation

    def running_sums(self, values: Longs) -> Longs:
        """Cumulative sums of `values`, one per token, that restart with each slice."""
        total = np.concatenate((np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)))
        sums: Longs = total[1:] - total[self.starts][self.slice_indices]
        return sums


def _pattern_words(layout: KVLayout) -> Longs:
    """A random odd number for each word of a token's record: [layer][k|v][kv_head][word]."""
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
    return mix(np.arange(np.prod(shape), dtype=np.uint64)).reshape(shape) | np.uint64(1)


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)
