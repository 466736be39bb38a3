"""How many prompt tokens a step may compute while sequences decode, so that TPOT stays bounded.

    seconds of a step = a + b sequences + c context  +  d new + e new (computed + new / 2)
                        `--------- decode --------'     `----------- prompts ------------'

(`sequences` decode, with `context` tokens in their caches; `new` prompt tokens are computed after
`computed` earlier ones.) The cost model is learned from the steps of this node: the decode part
from steps without prompts, the prompt part from what remains of mixed steps. A step with running
sequences earns `prefill_step_share` of its decode part as credit, and the prompts in it spend their
part. Over any stretch of time prompts therefore take at most that share of the time of decode, and
a running sequence gets its tokens at most 1 + share times as late as without them.

Credit of up to LOCAL_PREFILL_BURST_STEPS steps is saved, so that a short prompt is computed at
once: no step becomes longer by more than the share of so many steps and its own, or by one block
where that is more. A step that cannot afford a block computes none; a later step does.

Whatever the share, a step with running sequences is predicted to last at most `max_step_seconds`;
only one block of a prompt is always computed. The cost model knows the machine before the first
request from steps that were timed at start (step_measurement.py).

Where no share bounds prompts, a node may spread them over steps whose arithmetic is idle
(prompt_spreading.py). How many tokens a step has to spare follows from the same cost model: the
ridge point is the number of prompt tokens that take as long as a decode step of one sequence.

Bounding what prompts add to mixed steps is the idea of Agrawal et al., "Taming Throughput-Latency
Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024); there the bound is a number of tokens
that is profiled beforehand.
"""

import math
from typing import NamedTuple

from baton.limits import LOCAL_PREFILL_BURST_STEPS
from baton.online_fit import OnlineLinearFit
from node_engine.core.scheduling.prompt_spreading import PromptSpreading
from node_engine.core.step.step_batch import StepBatch

DECODE_PRIOR = (0.005, 0.0002, 0.00002)  # seconds: constant, per sequence, per 1024 context tokens
PREFILL_PRIOR = (0.05, 0.005)  # seconds: per 1024 tokens, per 1024**2 token pairs
_STEPS_BEFORE_SAMPLING = 32  # so many steps of each kind are all observed
SAMPLE_INTERVAL = 8  # afterwards one in so many
MAX_RIDGE_BLOCKS = 4  # beyond so many, chunks are computed at nearly the best rate anyway
_ROUNDING_MARGIN = 1.01
_KILO, _MEBI = 1 / 1024, 1 / 1024**2


class PromptTokenLimit(NamedTuple):
    """How many prompt tokens a step may compute."""

    tokens: int | None  # in whole blocks; None: no bound
    is_spread: bool = False  # more would be allowed


class PrefillTokenBudget:
    """Grants prompt tokens to steps that decode, from a cost model learned on this node."""

    def __init__(self, block_size: int) -> None:
        # Share of decode time that prompts may take; None: unbounded. May be changed at any time.
        self.prefill_step_share: float | None = None
        # Bound of a step with running sequences; None: unbounded. May be changed at any time.
        self.max_step_seconds: float | None = None
        # Whether prompts are spread over steps that wait for the weights, where no share is set.
        self.spreads_prompts = False
        self._block_size = block_size
        self._decode_fit = OnlineLinearFit(DECODE_PRIOR)
        self._prefill_fit = OnlineLinearFit(PREFILL_PRIOR)
        self._credit_seconds = 0.0  # negative (a debt) if steps took longer than predicted
        self._max_credit_seconds = 0.0  # bound of credit and debt
        self._spreading = PromptSpreading(block_size)
        self._num_steps = {True: 0, False: 0}  # by whether they had prompts

    @property
    def is_bounded(self) -> bool:
        """Whether steps with running sequences have a bound."""
        return self.prefill_step_share is not None or self.max_step_seconds is not None

    @property
    def decode_coefficients(self) -> tuple[float, float, float]:
        """Seconds of a decode step: constant, per sequence, per 1024 context tokens."""
        constant, per_sequence, per_kilo = self._decode_fit.coefficients
        return constant, per_sequence, per_kilo

    @property
    def prompt_token_seconds(self) -> float:
        """Seconds that the first tokens of a prompt add to a step, each."""
        return self._prefill_token_cost(0)[0]

    @property
    def ridge_tokens(self) -> int:
        """Tokens that a step computes while the weights are read; 0 if prompts are not spread."""
        token_seconds = self.prompt_token_seconds
        if not self.spreads_prompts or self.prefill_step_share is not None or token_seconds <= 0.0:
            return 0
        tokens = int(self.predict_decode_seconds(1, 0) / token_seconds)
        return min(tokens, MAX_RIDGE_BLOCKS * self._block_size)

    def predict_decode_seconds(self, num_sequences: int, context_tokens: int) -> float:
        """Predict a step of one token for each of `num_sequences`, without drafts and prompts."""
        return self._decode_fit.predict((1.0, float(num_sequences), context_tokens * _KILO))

    def compute_token_limit(
        self, num_sequences: int, context_tokens: int, computed_tokens: int, waiting_tokens: int
    ) -> PromptTokenLimit:
        """Limit the prompt tokens of the next step.

        `num_sequences` decode in it with `context_tokens` in their caches; `computed_tokens` of the
        prompt are computed already, and `waiting_tokens` of all prompts are not.
        """
        if not num_sequences:
            return PromptTokenLimit(None)
        decode = (1.0, float(num_sequences), context_tokens * _KILO)
        bounds = (
            self._limit_by_share(decode, computed_tokens),
            self._limit_by_step_seconds(decode, computed_tokens),
        )
        bound = min((limit for limit in bounds if limit is not None), default=None)
        spread = self._spreading.limit_tokens(
            waiting_tokens, self._count_spare_tokens(num_sequences)
        )
        if spread is None or (bound is not None and bound <= spread):
            return PromptTokenLimit(bound)
        return PromptTokenLimit(spread, is_spread=True)

    def _limit_by_share(
        self, decode: tuple[float, float, float], computed_tokens: int
    ) -> int | None:
        if self.prefill_step_share is None:
            return None
        slope, curve = self._prefill_token_cost(computed_tokens)
        earned = self.prefill_step_share * self._decode_fit.predict(decode)
        self._max_credit_seconds = max(
            LOCAL_PREFILL_BURST_STEPS * earned,
            _ROUNDING_MARGIN * self._block_size * (slope + curve * self._block_size / 2),
        )
        seconds = self._credit_seconds + earned
        return 0 if seconds <= 0.0 else self._count_tokens_within(seconds, slope, curve)

    def _limit_by_step_seconds(
        self, decode: tuple[float, float, float], computed_tokens: int
    ) -> int | None:
        if self.max_step_seconds is None:
            return None
        seconds = self.max_step_seconds - self._decode_fit.predict(decode)
        if seconds <= 0.0:
            return self._block_size
        tokens = self._count_tokens_within(seconds, *self._prefill_token_cost(computed_tokens))
        return None if tokens is None else max(tokens, self._block_size)

    def _count_spare_tokens(self, num_sequences: int) -> int:
        """Prompt tokens that cost next to nothing beside so many sequences."""
        return max(0, self.ridge_tokens - num_sequences) if num_sequences else 0

    def _count_tokens_within(self, seconds: float, slope: float, curve: float) -> int | None:
        """Prompt tokens that take so long; None if they cost nothing."""
        root = slope + math.sqrt(slope * slope + 2.0 * curve * seconds)
        if root <= 0.0:
            return None
        return _round_to_few_sizes(int(2.0 * seconds / root), self._block_size)

    def compute_time_share(self, batch: StepBatch, tokens: int) -> float:
        """Share of a step's time, 0 to 1, that a prompt with `tokens` tokens in it has added."""
        features = _StepFeatures.of(batch)
        if tokens == 1 or not features.prompt_tokens:
            return tokens / batch.num_tokens
        return self._prefill_fraction(features) * tokens / features.prompt_tokens

    def observe_step(self, batch: StepBatch, seconds: float) -> None:
        """Update credit and cost model after a step that took `seconds`."""
        features = _StepFeatures.of(batch)
        self._spreading.observe_step(features.prompt_tokens)
        if self.prefill_step_share is not None and features.num_sequences:
            self._add_credit(features, seconds, self.prefill_step_share)
        if batch.num_draft_tokens:
            return  # VerificationCost learns from these
        has_prompts = bool(features.prompt_tokens)
        self._num_steps[has_prompts] += 1
        num_steps = self._num_steps[has_prompts]
        if num_steps > _STEPS_BEFORE_SAMPLING and num_steps % SAMPLE_INTERVAL:
            return
        if not has_prompts:
            self._decode_fit.add_observation(features.decode, seconds)
        elif features.num_sequences:
            self._observe_prompts(features, seconds - self._decode_fit.predict(features.decode))
        elif num_steps <= _STEPS_BEFORE_SAMPLING:
            # A first estimate: without decode slices the whole step is charged to the prompt.
            self._prefill_fit.add_observation(features.list_prompt_inputs(0), seconds)

    def _add_credit(self, features: "_StepFeatures", seconds: float, share: float) -> None:
        if not features.prompt_tokens:
            self._max_credit_seconds = max(
                self._max_credit_seconds, LOCAL_PREFILL_BURST_STEPS * share * seconds
            )
        part = self._prefill_fraction(features)
        credit = self._credit_seconds + seconds * (share * (1.0 - part) - part)
        self._credit_seconds = max(-self._max_credit_seconds, min(credit, self._max_credit_seconds))

    def _observe_prompts(self, features: "_StepFeatures", seconds: float) -> None:
        """Learn from what prompts have added to a step, unless most of it was free."""
        if features.prompt_tokens >= 2 * self.ridge_tokens:
            spare = self._count_spare_tokens(features.num_sequences)
            self._prefill_fit.add_observation(features.list_prompt_inputs(spare), seconds)

    def _prefill_fraction(self, features: "_StepFeatures") -> float:
        if not features.num_sequences:
            return 1.0
        prefill_seconds = self._prefill_fit.predict(features.list_prompt_inputs(0))
        total = prefill_seconds + self._decode_fit.predict(features.decode)
        return prefill_seconds / total if total > 0.0 else 0.0

    def _prefill_token_cost(self, computed_tokens: int) -> tuple[float, float]:
        """Seconds of a prompt's next token, and the increase for each token after it."""
        kilo, pairs = self._prefill_fit.coefficients
        return kilo * _KILO + pairs * _MEBI * computed_tokens, pairs * _MEBI


def _round_to_few_sizes(tokens: int, block_size: int) -> int:
    """Round down to a number of whole blocks with at most three significant bits.

    Chunks then have few different lengths: on a GPU each new length may cost a search for kernels.
    The time not used remains as credit.
    """
    blocks = tokens // block_size
    shift = max(0, blocks.bit_length() - 3)
    return (blocks >> shift << shift) * block_size


class _StepFeatures(NamedTuple):
    """Inputs of the cost model. Slices of one token count as decode, draft tokens do not count."""

    num_sequences: int  # that decode
    context_tokens: int  # in their caches
    prompt_tokens: int
    prompt_pairs: float  # of a prompt token and one that it attends to

    @classmethod
    def of(cls, batch: StepBatch) -> "_StepFeatures":
        sequences = context_tokens = new = 0
        pairs = 0.0
        for slice_ in batch.slices:
            length = len(slice_.token_ids) - len(slice_.draft_specs)
            if length == 1:
                sequences += 1
                context_tokens += slice_.start + 1
            else:
                new += length
                pairs += length * (slice_.start + length / 2)
        return cls(sequences, context_tokens, new, pairs)

    @property
    def decode(self) -> tuple[float, float, float]:
        return 1.0, float(self.num_sequences), self.context_tokens * _KILO

    def list_prompt_inputs(self, spare_tokens: int) -> tuple[float, float]:
        return max(0, self.prompt_tokens - spare_tokens) * _KILO, self.prompt_pairs * _MEBI
