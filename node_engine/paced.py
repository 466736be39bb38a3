"""An engine without a model: it waits as long as a cost model says, and its tokens are a hash of the context.

It stands in for a model wherever the protocol, and not the arithmetic, is on trial. Its KV is real bytes in
the real arena. The record of the token at position p is

    word 0      token id                             digest_p = digest_{p-1} + mix(token, p)      (mod 2**64)
    words 1, 2  digest of the context up to p
    words 3..   a pattern of both and of the place: layer, K or V, head, word

so that the next token, a hash of the digest *read from the arena*, depends on the whole context, as attention
does. KV that was never written, belongs to other tokens, positions or layers, or has a flipped bit does not
match its pattern; the mismatch is mixed into the hash. **Wrong KV therefore gives a wrong token, not an
error**: it is what a model would do, and the comparison with `paced_reference` has to notice. The whole
context is read when a sequence is first seen (after a hand-off or a cache hit); later steps read its last
block only, because the rest was checked and belongs to it.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError
from baton.kv_layout import KVLayout
from baton.types import BlockIndex
from node_engine.core.step import OnLayer, SampleSpec, SequenceId, Slice, StepBatch

PACED_LAYOUT = KVLayout(num_layers=4, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")

_Words = npt.NDArray[np.uint32]
_Longs = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class PacedCosts:
    """How long a step takes, in microseconds. A slice of one token that samples counts as decode, any other
    as prefill; *resident* and *cached* tokens are those whose KV the slice finds in the arena."""

    step_base: float = 0.0
    prefill_per_token: float = 20.0
    prefill_per_cached_token: float = 0.01
    decode_base: float = 2000.0  # once per step that decodes
    decode_per_sequence: float = 20.0
    decode_per_resident_token: float = 0.05

    def seconds(self, batch: StepBatch) -> float:
        micros, decoding = self.step_base, False
        for piece in batch.slices:
            if len(piece.tokens) == 1 and piece.sample is not None:
                decoding = True
                micros += self.decode_per_sequence + self.decode_per_resident_token * piece.start
            else:
                micros += self.prefill_per_token * len(piece.tokens) + self.prefill_per_cached_token * piece.start
        return (micros + (self.decode_base if decoding else 0.0)) * 1e-6


FREE_OF_COST = PacedCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class PacedEngine:
    """See the module. `wait(seconds)` is called once per layer; `eos_probability` makes EOS end outputs now
    and then."""

    def __init__(
        self,
        costs: PacedCosts | None = None,
        *,
        layout: KVLayout = PACED_LAYOUT,
        vocab_size: int = 32000,
        eos_token_ids: tuple[int, ...] = (0,),
        eos_probability: float = 0.0,
        max_model_len: int = 8192,
        wait: Callable[[float], None] | None = None,
    ) -> None:
        if layout.dtype != "float32" or layout.head_dim < 4:
            raise ConfigError(
                f"the paced engine needs float32 and head_dim >= 4, not {layout.dtype}, {layout.head_dim}"
            )
        self._costs = costs if costs is not None else PacedCosts()
        self._layout = layout
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._eos_probability = eos_probability
        self._max_model_len = max_model_len
        self._wait = wait if wait is not None else _wait
        self._site = _site_words(layout)
        self._kv: _Words = np.zeros(0, np.uint32)
        self._seen: OrderedDict[SequenceId, None] = OrderedDict()  # whose context was read in full
        self._seen_limit = 0

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
        spelled = f"paced 1 {self._vocab_size} {self._eos} {self._eos_probability} {self._max_model_len}"
        return hashlib.sha256(spelled.encode()).digest()

    def bind(self, arena: memoryview, num_blocks: int) -> None:
        """The arena as words [block][layer][k|v][kv_head][token][word]."""
        layout = self._layout
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        self._kv = np.frombuffer(arena, np.uint32, num_blocks * layout.block_bytes // 4).reshape(shape)
        self._seen_limit = num_blocks  # a live sequence has at least one block
        self._seen.clear()

    def run(self, batch: StepBatch, on_layer: OnLayer | None = None) -> tuple[int | None, ...]:
        for source, destination in batch.copies:
            self._kv[destination] = self._kv[source]
        writes, sampled = [], []
        for piece in batch.slices:
            before, damage = self._read_context(piece)
            digests = before + np.cumsum(_mix_tokens(piece.tokens, piece.start))
            writes.append((piece, self._records(np.array(piece.tokens, np.uint64), digests)))
            last = (int(digests[-1]) + damage) & _MASK
            sampled.append(None if piece.sample is None else self._draw(last, piece.sample))
        pause = self._costs.seconds(batch) / self._layout.num_layers
        for layer in range(self._layout.num_layers):
            for piece, records in writes:
                self._write(piece, layer, records)
            if pause > 0:
                self._wait(pause)
            if on_layer is not None:
                on_layer(layer)
        return tuple(sampled)

    # KV

    def _read_context(self, piece: Slice) -> tuple[np.uint64, int]:
        """Digest of the tokens before the slice as the arena has it, and a value that is 0 only if all that
        was read is as it should be."""
        known = piece.sequence in self._seen
        self._seen[piece.sequence] = None
        self._seen.move_to_end(piece.sequence)
        if len(self._seen) > self._seen_limit:
            self._seen.popitem(last=False)
        if piece.start == 0:
            return np.uint64(0), 0
        first = (piece.start - 1) // self._layout.block_size if known else 0
        records = self._gather(piece.block_table, first, piece.start)
        tokens = records[:, 0, 0, 0, 0].astype(np.uint64)
        digests = records[:, 0, 0, 0, 1].astype(np.uint64) | records[:, 0, 0, 0, 2].astype(np.uint64) << np.uint64(32)
        wrong = (records ^ self._records(tokens, digests)).astype(np.uint64) * (self._site | np.uint64(1))
        steps = np.diff(digests, prepend=np.uint64(0)) - _mix_tokens(tokens, first * self._layout.block_size)
        if first > 0:
            steps = steps[1:]  # the digest before a later block was checked when that block was read
        return digests[-1], _fold(wrong) ^ _fold(steps)

    def _gather(self, block_table: Sequence[BlockIndex], first: int, end: int) -> _Words:
        """Records [token][layer][k|v][kv_head][word] of positions first * block_size .. end."""
        size = self._layout.block_size
        blocks = self._kv[list(block_table[first : -(-end // size)])]
        records = np.moveaxis(blocks, 4, 1).reshape(-1, *self._site.shape)
        return records[: end - first * size]

    def _records(self, tokens: _Longs, digests: _Longs) -> _Words:
        """What belongs in the arena for these tokens: [token][layer][k|v][kv_head][word]."""
        base = _mix(digests ^ _mix(tokens))
        records = ((base[:, None, None, None, None] ^ self._site) * self._site >> np.uint64(32)).astype(np.uint32)
        records[..., 0] = tokens.astype(np.uint32)[:, None, None, None]
        records[..., 1] = digests.astype(np.uint32)[:, None, None, None]
        records[..., 2] = (digests >> np.uint64(32)).astype(np.uint32)[:, None, None, None]
        return records

    def _write(self, piece: Slice, layer: int, records: _Words) -> None:
        size = self._layout.block_size
        position, end = piece.start, piece.start + len(piece.tokens)
        while position < end:
            stop = min(end, (position // size + 1) * size)
            part = records[position - piece.start : stop - piece.start, layer]
            block = self._kv[piece.block_table[position // size], layer]
            block[:, :, position % size : position % size + stop - position] = np.moveaxis(part, 0, 2)
            position = stop

    def _draw(self, digest: int, sample: SampleSpec) -> int:
        return _draw(digest, sample.position, self._vocab_size, self._eos, self._eos_probability, sample.forbidden)


def paced_reference(
    prompt: Sequence[int],
    n: int,
    vocab_size: int = 32000,
    *,
    eos_token_ids: tuple[int, ...] = (0,),
    eos_probability: float = 0.0,
) -> list[int]:
    """The first `n` tokens that a PacedEngine of that vocabulary gives after `prompt`, computed without
    blocks or KV. It does not stop at EOS."""
    tokens = list(prompt)
    digest = int(_mix_tokens(tokens, 0).sum(dtype=np.uint64))
    for position in range(len(prompt), len(prompt) + n):
        token = _draw(digest, position, vocab_size, eos_token_ids, eos_probability, ())
        digest = (digest + int(_mix_tokens((token,), position)[0])) & _MASK
        tokens.append(token)
    return tokens[len(prompt) :]


def _draw(
    digest: int,
    position: int,
    vocab_size: int,
    eos: Sequence[int],
    eos_probability: float,
    forbidden: Sequence[int],
) -> int:
    """The token at `position` after a context with that digest."""
    value = _mix_int(digest ^ _mix_int(position))
    allowed_eos = [token for token in eos if token not in forbidden]
    if allowed_eos and value / (_MASK + 1) < eos_probability:
        return allowed_eos[0]
    while True:
        value = _mix_int(value)
        token = value % vocab_size
        if token not in eos and token not in forbidden:
            return token


def _mix(values: _Longs) -> _Longs:
    """Stafford's variant 13 of the 64-bit finalizer (as in SplitMix64): a bijection that scatters every
    bit."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def _mix_int(value: int) -> int:
    return int(_mix(np.array([value], np.uint64))[0])


def _mix_tokens(tokens: Sequence[int] | _Longs, start: int) -> _Longs:
    """What each token, at positions start.., adds to the digest."""
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    return _mix(np.asarray(tokens, np.uint64) + (positions << np.uint64(32)))


def _fold(values: _Longs) -> int:
    """0 if all are 0, else almost surely not; equal mismatches at different places do not cancel."""
    flat = values.reshape(-1)
    return int((flat * _mix(np.arange(flat.size, dtype=np.uint64))).sum(dtype=np.uint64)) if flat.any() else 0


def _site_words(layout: KVLayout) -> _Longs:
    """A random odd number for each place of a token's record: [layer][k|v][kv_head][word]."""
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
    return _mix(np.arange(np.prod(shape), dtype=np.uint64)).reshape(shape) | np.uint64(1)


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)
