"""Speculative decoding of a node: which drafts the next step verifies, and what they have cost.

Drafts come from the sequences themselves (ngram_proposer.py) or from a smaller model
(model_drafter.py), which drafts after it was decided how many tokens. The token of each position is
drawn with the noise of that position, as without speculation. A draft token is accepted if it is
the one that is drawn. So the output is the same as without speculation, for any temperature,
filter, penalty, bias and grammar.

A step verifies drafts if it computes no prompt, and as far as they make it more productive
(draft_lengths.py) and free blocks remain that nobody waits for.
"""

from collections.abc import Sequence as SequenceOf

from node_engine.core.scheduling.capacity import SchedulerLimits
from node_engine.core.scheduling.draft_orders import make_draft_order
from node_engine.core.scheduling.kv_cache_manager import KVCacheManager
from node_engine.core.scheduling.prefill_token_budget import PrefillTokenBudget
from node_engine.core.sequences.sequence import Sequence
from node_engine.core.sequences.stop_rules import stop_token_ids
from node_engine.core.speculation.acceptance_rate import AcceptanceRate
from node_engine.core.speculation.draft_lengths import MIN_GAIN, DraftOffer, choose_draft_lengths
from node_engine.core.speculation.drafting import Drafting, DraftResult
from node_engine.core.speculation.drafting_cost import DraftingCost
from node_engine.core.speculation.model_drafter import ModelDrafter
from node_engine.core.speculation.ngram_proposer import NgramProposer
from node_engine.core.speculation.verification_cost import VerificationCost
from node_engine.core.step.step_batch import SequenceSlice, StepBatch

# A node whose drafts seem too dear verifies one all the same in one of so many steps that offer
# some, so that it notices when they are not.
PROBE_INTERVAL_STEPS = 256
PROBE_TOKENS = 4
MAX_PROBE_SHARE = 0.01  # of the time of steps, for contexts that a draft model computes for probes
MIN_PROBE_RATE = 0.5  # of acceptance: a draft that is probably wrong would only cost
MIN_MODEL_GAIN = 1.1  # of tokens a second: the cost of a draft model is one more estimate
REPLAN_STEPS = 8  # with a draft model, after so many steps for which no draft was worth it
_NO_OFFER = DraftOffer(0, 0.0)


class Speculator:
    """Chooses the drafts of running sequences. Compute thread only, but for `counters`."""

    def __init__(
        self,
        limits: SchedulerLimits,
        eos_token_ids: tuple[int, ...],
        cache_manager: KVCacheManager,
        step_budget: PrefillTokenBudget,
    ) -> None:
        """`step_budget` has the cost model of steps without drafts."""
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._cache_manager = cache_manager
        self._step_budget = step_budget
        self._costs = VerificationCost(step_budget)
        self._drafter: ModelDrafter | None = None
        self._drafting_cost = DraftingCost()
        self._acceptance = AcceptanceRate()  # of all sequences
        self._num_steps_to_skip = 0  # before a draft model is considered again
        self._num_steps_without_probe = 0  # that had drafts to verify and did not
        self._num_drafts = 0
        self._totals = DraftResult()

    def use_draft_model(self, drafter: ModelDrafter) -> None:
        """Let a model draft, and not the sequences themselves."""
        self._drafter = drafter

    @property
    def is_enabled(self) -> bool:
        return self._limits.max_draft_tokens > 0

    def counters(self) -> dict[str, float]:
        """Counters of the node, by metric name; empty without speculation."""
        if not self.is_enabled:
            return {}
        totals = self._totals
        drafter = self._drafter
        own = {} if drafter is None else {"baton_draft_model_seconds_total": drafter.total_seconds}
        return {
            **own,
            "baton_drafts_total": float(self._num_drafts),
            'baton_draft_tokens_total{result="accepted"}': float(totals.num_accepted),
            'baton_draft_tokens_total{result="rejected"}': float(totals.num_rejected),
            'baton_draft_tokens_total{result="unused"}': float(totals.num_unused),
        }

    @property
    def drafting_seconds(self) -> float:
        """How long a draft model has computed for the next step."""
        return self._drafter.last_seconds if self._drafter is not None else 0.0

    def plan_drafts(self, sequences: SequenceOf[Sequence], *, has_prompts: bool) -> None:
        """Decide which drafts of `sequences` the next step verifies.

        They are all that run in the step; with `has_prompts` it also computes prompts.
        """
        if self._drafter is not None:
            self._drafter.begin_plan()
        if has_prompts:
            for sequence in sequences:
                if sequence.drafting is not None:
                    sequence.drafting.discard_proposal()
            return
        if self._num_steps_to_skip:
            self._num_steps_to_skip -= 1
            self._num_steps_without_probe += 1
            return
        offers = [self._make_offer(sequence) for sequence in sequences]
        if all(offer.num_tokens == 0 for offer in offers):
            return
        lengths = self._choose_lengths(sequences, offers)
        if self._drafter is not None:
            if not any(lengths):
                self._num_steps_to_skip = REPLAN_STEPS - 1
                return
            lengths = self._draft_with_model(self._drafter, sequences, lengths)
        if any(lengths) and (self._drafter is None or self._drafter.is_typical):
            self._num_steps_without_probe = 0
        for sequence, length in zip(sequences, lengths, strict=True):
            if length and sequence.drafting is not None:
                sequence.drafting.verify_tokens(
                    self._cache_manager.grow_for_drafts(sequence, length)
                )

    def record_slice(
        self, sequence: Sequence, slice_: SequenceSlice, drawn: SequenceOf[int], *, has_ended: bool
    ) -> DraftResult:
        """Learn from the tokens that a step has appended to a running sequence."""
        if sequence.drafting is None:
            return DraftResult()
        result = sequence.drafting.record_output(drawn, slice_.draft_token_ids, has_ended=has_ended)
        if result.num_drafted:
            self._num_drafts += 1
            self._totals = DraftResult(*map(sum, zip(self._totals, result, strict=True)))
        return result

    def observe_step(self, batch: StepBatch, seconds: float) -> None:
        """Learn what verification costs from a step that took `seconds`."""
        if batch.num_draft_tokens:
            self._costs.observe_step(batch, seconds)

    def _make_offer(self, sequence: Sequence) -> DraftOffer:
        """The draft that a sequence has to offer, within the bounds of its length."""
        if sequence.drafting is None:
            proposer = None if self._drafter is not None else NgramProposer(sequence.token_ids)
            sequence.drafting = Drafting(proposer, self._acceptance)
        drafting = sequence.drafting
        rate = drafting.acceptance.rate
        if self._drafter is not None:
            drafting.discard_proposal()
            possible = self._drafter.count_possible_tokens(len(sequence.token_ids))
            longest = min(self._limits.max_draft_tokens, self._count_room(sequence), possible)
            return DraftOffer(longest, rate) if longest > 0 else _NO_OFFER
        if not drafting.propose_tokens(self._limits.max_draft_tokens):
            return _NO_OFFER
        return DraftOffer(self._cut_proposal(sequence, drafting), rate)

    def _draft_with_model(
        self, drafter: ModelDrafter, sequences: SequenceOf[Sequence], lengths: SequenceOf[int]
    ) -> list[int]:
        """Let the model draft; returns how many tokens it has drafted of each sequence."""
        chosen = [
            make_draft_order(sequence, length, self._eos_token_ids, drafter.vocab_size)
            for sequence, length in zip(sequences, lengths, strict=True)
            if length
        ]
        drafts = iter(drafter.draft_tokens(chosen))
        if drafter.is_typical:
            if self._num_steps_without_probe >= PROBE_INTERVAL_STEPS:
                self._drafting_cost.forget()
            self._drafting_cost.observe_drafts(
                drafter.last_steps, drafter.last_tokens, drafter.last_seconds
            )
        drafted = []
        for sequence, length in zip(sequences, lengths, strict=True):
            count = 0
            if length and sequence.drafting is not None:
                sequence.drafting.set_proposal(next(drafts))
                count = self._cut_proposal(sequence, sequence.drafting)
            drafted.append(count)
        return drafted

    def _cut_proposal(self, sequence: Sequence, drafting: Drafting) -> int:
        """Cut a proposal at the end of its sequence; returns how many tokens are left."""
        ends = stop_token_ids(sequence.work.request.sampling, self._eos_token_ids)
        return len(drafting.cut_proposal(self._count_room(sequence), ends))

    def _count_room(self, sequence: Sequence) -> int:
        """Tokens that may follow in a sequence, but for the one after them."""
        return min(
            sequence.num_remaining_tokens - 1,
            self._limits.max_model_len - len(sequence.token_ids) - 1,
        )

    def _choose_lengths(
        self, sequences: SequenceOf[Sequence], offers: SequenceOf[DraftOffer]
    ) -> list[int]:
        count = len(sequences)
        context_tokens = sum(len(sequence.token_ids) for sequence in sequences)
        max_tokens = self._limits.max_batched_tokens - count

        def predict_seconds(num_drafts: int, longest: int) -> float:
            seconds = self._costs.predict_seconds(count, context_tokens, num_drafts)
            if self._drafter is not None:
                seconds += self._drafting_cost.predict_seconds(longest, num_drafts)
            return seconds

        lengths = choose_draft_lengths(
            offers,
            num_sequences=count,
            max_tokens=max_tokens,
            plain_seconds=self._step_budget.predict_decode_seconds(count, context_tokens),
            verification_seconds=predict_seconds,
            min_gain=MIN_GAIN if self._drafter is None else MIN_MODEL_GAIN,
        )
        if any(lengths):
            return lengths
        self._num_steps_without_probe += 1
        place = self._choose_probe(sequences, offers)
        if place is None:
            return lengths
        self._costs.forget()
        lengths[place] = min(offers[place].num_tokens, max_tokens, PROBE_TOKENS)
        return lengths

    def _choose_probe(
        self, sequences: SequenceOf[Sequence], offers: SequenceOf[DraftOffer]
    ) -> int | None:
        """Now and then, the sequence whose draft is verified all the same, to learn what it costs.

        Without a draft model it is one that is likely right. Of drafts of a model only those that
        are made show whether they are right, and there the context may have to be computed first.
        """
        if self._num_steps_without_probe < PROBE_INTERVAL_STEPS:
            return None
        places = [place for place, offer in enumerate(offers) if offer.num_tokens]
        drafter = self._drafter
        if drafter is None:
            best = max(places, key=lambda place: offers[place].acceptance_rate)
            return best if offers[best].acceptance_rate >= MIN_PROBE_RATE else None
        seconds = {
            place: drafter.estimate_catch_up_seconds(
                sequences[place].id, len(sequences[place].token_ids)
            )
            for place in places
        }
        best = min(places, key=seconds.__getitem__)
        context_tokens = sum(len(sequence.token_ids) for sequence in sequences)
        plain = self._step_budget.predict_decode_seconds(len(sequences), context_tokens)
        allowed = MAX_PROBE_SHARE * self._num_steps_without_probe * plain
        return best if seconds[best] <= allowed else None
