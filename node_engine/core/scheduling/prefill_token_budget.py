"""How much of a prompt a step may compute beside sequences that decode, so that these keep their
pace.

    seconds of a step = a + b sequences + c resident  +  d new + e new (before + new / 2)
                        `--------- decode ---------'     `---------- prompts ----------'

is learned from the steps of this node: the first part from those without prompts, the second from
what is left of those with both. A step with running sequences earns `share` of its decode part; the
prompts in it spend theirs. So over any stretch of time prompts take at most `share` of what decode
takes, and a running sequence gets its tokens at most 1 + `share` times as late as without them.
Credit of `DEFAULT_BURST` steps is saved up, so that a short prompt is computed at once: no single
step is longer by more than the share of so many and its own, or by a block where that is more. A
step that cannot afford a block takes none, and a later one does.

Bounding what prompts add to mixed steps is the idea of Agrawal et al., "Taming Throughput-Latency
Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024); there the bound is a number of tokens
that is profiled beforehand.
"""

import math

from baton.limits import LOCAL_PREFILL_BURST_STEPS as BURST
from baton.online_fit import OnlineLinearFit
from node_engine.core.step.step_batch import StepBatch

DECODE_PRIOR = (0.005, 0.0002, 0.00002)  # seconds: as such, per sequence, per 1024 tokens in caches
PREFILL_PRIOR = (0.05, 0.005)  # per 1024 tokens, per 1024**2 token pairs
SAMPLE_INTERVAL = 8  # one of so many steps is learned from, once `_ENOUGH` of their kind were
_STEPS_BEFORE_SAMPLING = 32
_ROUNDING_MARGIN = 1.01
_KILO, _MEBI = 1 / 1024, 1 / 1024**2


class PrefillTokenBudget:
    """`prefill_step_share` None: prompts may fill a step. It may be changed at any time."""

    def __init__(self, block_size: int) -> None:
        self.prefill_step_share: float | None = None
        self._block_size = block_size
        self._decode_fit = OnlineLinearFit(DECODE_PRIOR)
        self._prefill_fit = OnlineLinearFit(PREFILL_PRIOR)
        self._credit_seconds = (
            0.0  # seconds; also a debt, where steps took longer than was predicted
        )
        self._max_credit_seconds = 0.0  # of credit and of debt
        self._num_steps = {True: 0, False: 0}  # with prompts, without

    def compute_token_limit(self, sequences: int, resident: int, before: int) -> int | None:
        """What the next step may take of a prompt of which `before` tokens are computed, beside
        `sequences` that have `resident` tokens in their caches, in whole blocks; None: no bound."""
        if self.prefill_step_share is None or not sequences:
            return None
        slope, curve = self._prefill_token_cost(before)
        earned = self.prefill_step_share * self._decode_fit.predict(
            (1.0, sequences, resident * _KILO)
        )
        self._max_credit_seconds = max(
            BURST * earned,
            _ROUNDING_MARGIN * self._block_size * (slope + curve * self._block_size / 2),
        )
        seconds = self._credit_seconds + earned
        if seconds <= 0.0:
            return 0
        root = slope + math.sqrt(slope * slope + 2.0 * curve * seconds)
        return (
            _round_to_few_sizes(int(2.0 * seconds / root), self._block_size) if root > 0.0 else None
        )

    def compute_time_share(self, batch: StepBatch, tokens: int) -> float:
        """Of a step's time, the share, 0 to 1, of a prompt that has so many tokens in it: what it
        adds to the step, as far as is known."""
        decode, prompts = _step_features(batch)
        new = prompts[0] / _KILO
        if tokens == 1 or not new:
            return tokens / batch.num_tokens
        return self._prefill_fraction(decode, prompts) * tokens / new

    def observe_step(self, batch: StepBatch, seconds: float) -> None:
        """A step has run."""
        decode, prompts = _step_features(batch)
        running, mixed = bool(decode[1]), bool(prompts[0])
        if self.prefill_step_share is not None and running:
            if not mixed:
                self._max_credit_seconds = max(
                    self._max_credit_seconds, BURST * self.prefill_step_share * seconds
                )
            part = self._prefill_fraction(decode, prompts)
            earned = seconds * (self.prefill_step_share * (1.0 - part) - part)
            self._credit_seconds = max(
                -self._max_credit_seconds,
                min(self._credit_seconds + earned, self._max_credit_seconds),
            )
        self._num_steps[mixed] += 1
        if (
            self._num_steps[mixed] > _STEPS_BEFORE_SAMPLING
            and self._num_steps[mixed] % SAMPLE_INTERVAL
        ):
            return
        if not mixed:
            self._decode_fit.add_observation(decode, seconds)
        elif running:
            self._prefill_fit.add_observation(prompts, seconds - self._decode_fit.predict(decode))
        elif (
            self._num_steps[mixed] <= _STEPS_BEFORE_SAMPLING
        ):  # better than nothing: beside nobody a prompt pays for the whole step
            self._prefill_fit.add_observation(prompts, seconds)

    def _prefill_fraction(self, decode: tuple[float, ...], prompts: tuple[float, ...]) -> float:
        if not decode[1]:
            return 1.0
        theirs = self._prefill_fit.predict(prompts)
        whole = theirs + self._decode_fit.predict(decode)
        return theirs / whole if whole > 0.0 else 0.0

    def _prefill_token_cost(self, before: int) -> tuple[float, float]:
        """Seconds of a prompt's next token, and how much more each one after it takes."""
        kilo, pairs = self._prefill_fit.coefficients
        return kilo * _KILO + pairs * _MEBI * before, pairs * _MEBI


def _round_to_few_sizes(tokens: int, block_size: int) -> int:
    """Rounds down to whole blocks whose number has at most three significant bits, so that chunks
    come in few lengths: on a GPU each new one may cost a search for kernels. What is not taken
    remains as credit."""
    blocks = tokens // block_size
    shift = max(0, blocks.bit_length() - 3)
    return (blocks >> shift << shift) * block_size


def _step_features(batch: StepBatch) -> tuple[tuple[float, float, float], tuple[float, float]]:
    """A slice of one token is a step of decode, or costs as little as one."""
    sequences = resident = new = 0
    pairs = 0.0
    for piece in batch.slices:
        length = len(piece.token_ids)
        if length == 1:
            sequences += 1
            resident += piece.start + 1
        else:
            new += length
            pairs += length * (piece.start + length / 2)
    return (1.0, float(sequences), resident * _KILO), (new * _KILO, pairs * _MEBI)
