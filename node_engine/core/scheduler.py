"""One scheduler for both roles: which sequences compute what in the next step.

A step has a budget of tokens. Running sequences take one each; the rest, or what `PrefillAllowance` grants of it, goes
to prompts in chunks that end on block boundaries (except a prompt's last), the firm before the speculative, higher
classes first, then whoever is due first. A prompt is due when, since its arrival, `STRETCH` times as many tokens have
been computed as it has itself: so short ones pass long ones, and none is passed for ever. The one that has been at it
longest gets a block in every step, so that a hand-off under way never stands still. All blocks of a context
are allocated at admission, so that a half-computed prompt never waits for memory; a running sequence grows block by
block.

    for ever:  plan = next_step();  computed = engine.run(plan.batch);  outcomes = update(plan.batch, computed)

Every other method may be called at any time, also between `next_step` and `update`: a sequence that ends there takes
no further part, but its blocks return in `update`, because until then the engine may be writing them.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count

from baton.block_hash import BlockHash
from baton.errors import ConfigError, OutOfBlocks, TooLong
from baton.hash_chain import HashChain
from baton.types import AttemptKey, TicketId, TokenEvent, TokenScore, Work
from node_engine.core.block_pool import BlockPool
from node_engine.core.finish import finish_reason, forbidden_ids
from node_engine.core.ledger import LedgerError
from node_engine.core.outcome import Emitted, Outcome, PrefillCompleted, PromptScored, StepPlan
from node_engine.core.prefill_allowance import PrefillAllowance
from node_engine.core.residency import Refusal, Residency
from node_engine.core.sequence import Sequence, SequenceState
from node_engine.core.sequence_table import SequenceTable
from node_engine.core.step import Computed, SampleSpec, SequenceId, Slice, StepBatch
from node_engine.core.victims import MostBlocks, VictimPolicy

WAITING, PREFILLING, HANDING_OFF = SequenceState.WAITING, SequenceState.PREFILLING, SequenceState.HANDING_OFF
AWAITING_KV, RUNNING = SequenceState.AWAITING_KV, SequenceState.RUNNING
STRETCH = 4  # tokens of others that may go before a prompt's own, for each of these


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_num_seqs` bounds the sequences that compute or are about to, `max_batched_tokens` the tokens of a step,
    `max_model_len` prompt and output together."""

    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Survey:
    """What serving a context here would take. `lacking` tokens of it, at least one, would have to be computed or
    received; `refusal` says why this node cannot compute them itself now."""

    lacking: int
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class Load:
    """Live sequences by state, and tokens of context that are still to be computed here."""

    sequences: dict[SequenceState, int]
    queued_tokens: int


class Scheduler:
    """Called on the compute thread only. At most one live sequence per attempt key."""

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        eos_token_ids: tuple[int, ...] = (),
        victims: VictimPolicy | None = None,
    ) -> None:
        least = limits.max_num_seqs - 1 + pool.block_size
        if limits.max_num_seqs < 1 or limits.max_batched_tokens < least:
            raise ConfigError(
                f"max_batched_tokens is {limits.max_batched_tokens}, but max_num_seqs {limits.max_num_seqs} with"
                f" block_size {pool.block_size} needs {least}: raise --max-batched-tokens or lower --max-num-seqs"
            )
        self.pool = pool
        self.limits = limits
        self.allowance = PrefillAllowance(pool.block_size)
        self._eos = eos_token_ids
        self._ids = count()
        self._table = SequenceTable()
        self._residency = Residency(pool, self._table, limits.max_num_seqs, victims or MostBlocks())
        self._prefilled = 0  # tokens of prompts computed so far: the time by which prompts are due
        self._in_flight: StepBatch | None = None
        self._computing: dict[SequenceId, Sequence] = {}  # of the step in flight

    # what there is

    def get(self, key: AttemptKey) -> Sequence | None:
        return self._table.get(key)

    def sequences(self) -> tuple[Sequence, ...]:
        return tuple(self._table)

    def computing(self, sequence: SequenceId) -> Sequence:
        """The sequence of a slice of the step in flight."""
        return self._computing[sequence]

    @property
    def free_slots(self) -> int:
        """How many sequences `expect` would still take: what a node reports as room for new work."""
        return self._residency.unclaimed_slots

    @property
    def free_blocks(self) -> int:
        """How many blocks `expect` would still give: what a node reports as room for new work."""
        return self._residency.unclaimed_blocks

    def load(self) -> Load:
        queued = sum(
            sequence.context_len - sequence.num_computed
            for state in (WAITING, PREFILLING)
            for sequence in self._table.within(state).values()
        )
        return Load({state: len(self._table.within(state)) for state in SequenceState}, queued)

    def survey(self, work: Work, root: BlockHash) -> Survey:
        """Look, and keep nothing. Raises TooLong or OutOfBlocks if the context can never fit."""
        sequence = self._new(work, root, hand_off=False)
        lacking, refusal = self._residency.survey(sequence)
        return Survey(lacking, refusal)

    # sequences come and go

    def add(self, work: Work, root: BlockHash, *, hand_off: bool = False) -> Sequence:
        """Compute the context of `work` here, then decode it or, with `hand_off`, stop after the first token.

        Raises TooLong or OutOfBlocks if it can never fit; nothing is then kept."""
        sequence = self._new(work, root, hand_off)
        self._table.enter(sequence)
        return sequence

    def expect(self, work: Work, root: BlockHash, ticket: TicketId) -> Sequence | Refusal:
        """Another node will write the KV of `work`: match what is here and reserve the rest under `ticket`. The
        answer comes at once. Afterwards `block_table` is what was matched and `promised` what is to be written behind
        it.

        Raises TooLong or OutOfBlocks if it can never fit; nothing is then kept."""
        sequence = self._new(work, root, hand_off=False)
        refusal = self._residency.reserve(sequence, ticket)
        if refusal is not None:
            return refusal
        self._table.enter(sequence)
        self._table.move(sequence, AWAITING_KV)
        return sequence

    def adopt(self, key: AttemptKey, sampled: tuple[int, ...] = (), score: TokenScore | None = None) -> list[Outcome]:
        """The hand-off is complete: commit its blocks and decode on. `sampled` is the first token, if the other node
        has drawn it, and `score` its score; without it the last token of the context is run here, as when a decode is
        continued."""
        sequence = self._table.require(key, AWAITING_KV)
        if len(sampled) > 1:
            raise LedgerError(f"sequence {key}: {len(sampled)} tokens drawn elsewhere, at most 1 can be")
        self._residency.commit(sequence, sequence.context_len + len(sampled) - 1)
        self._table.move(sequence, RUNNING)
        return [self._accept(sequence, token, score) for token in sampled]

    def ticket_arrived(self, key: AttemptKey) -> None:
        """Somebody has promised room for this prefill: it is speculative no more."""
        sequence = self._table.require(key, WAITING, PREFILLING, HANDING_OFF)
        if not sequence.has_ticket:
            sequence.has_ticket, sequence.turn = True, next(self._ids)

    def stop(self, key: AttemptKey) -> None:
        """Compute no more for a prefill whose blocks a sender may be reading: HANDING_OFF until `release`."""
        sequence = self._table.require(key, WAITING, PREFILLING, HANDING_OFF)
        sequence.stopped = True
        if sequence.state is not HANDING_OFF:
            self._table.move(sequence, HANDING_OFF)

    def release(self, key: AttemptKey) -> None:
        """The sender reads the blocks of this HANDING_OFF sequence no more."""
        self._residency.finish(self._table.require(key, HANDING_OFF))

    def cancel(self, key: AttemptKey) -> bool:
        """End a sequence in whatever state it is; False if there is none. Every block that it holds returns;
        `promised` blocks are the ticket's and return when that is fenced."""
        sequence = self._table.get(key)
        if sequence is not None:
            self._residency.finish(sequence)
        return sequence is not None

    # steps

    def next_step(self) -> StepPlan:
        """Decide the next step. If there is a batch, `update` or `abandon` has to follow."""
        if self._in_flight is not None:
            raise LedgerError("the step in flight has not been updated")
        growing = self._growing()
        chosen = [(sequence, 1) for sequence in growing]
        budget = self._prompt_budget(growing)
        self._admit(budget)
        prefilling = sorted(self._table.within(PREFILLING).values(), key=lambda each: each.rank)
        oldest = min(
            (each for each in prefilling if each.begun and not each.speculative),
            key=lambda each: each.turn,
            default=None,
        )
        for sequence in prefilling:
            oldest = None if sequence is oldest else oldest
            length = self._chunk(sequence, budget - (self.pool.block_size if oldest else 0))
            if length:
                chosen.append((sequence, length))
                budget -= length
        outcomes = tuple(self._residency.take_outcomes())
        return StepPlan(self._launch(chosen) if chosen else None, outcomes)

    def update(self, batch: StepBatch, computed: SequenceOf[Computed]) -> list[Outcome]:
        """The step has run: `computed` is what each slice gave."""
        self._require_in_flight(batch)
        outcomes: list[Outcome] = []
        for piece, made in zip(batch.slices, computed, strict=True):
            sequence = self._computing[piece.sequence]
            if sequence.state not in (PREFILLING, RUNNING):
                continue  # cancelled or stopped meanwhile
            self._prefilled += len(piece.tokens) if sequence.state is PREFILLING else 0
            sequence.num_computed += len(piece.tokens)
            self._residency.copy_done(sequence)
            self._residency.seal(sequence)
            if piece.scoring is not None:
                outcomes.append(PromptScored(sequence, piece.start + 1, made.prompt_scores))
            if piece.sample is not None:
                if made.token is None:
                    raise LedgerError(f"sequence {sequence.key}: no token was drawn")
                outcomes.append(self._accept(sequence, made.token, made.score))
        self._land()
        return outcomes

    def abandon(self, batch: StepBatch) -> None:
        """The step failed: nothing was computed. Its sequences are as before `next_step`, and may be tried again."""
        self._require_in_flight(batch)
        self._land()

    # the steps underneath

    def _new(self, work: Work, root: BlockHash, hand_off: bool) -> Sequence:
        tokens = list(work.context)
        if not tokens or self._table.get(work.key) is not None:
            raise LedgerError(f"sequence {work.key} has {len(tokens)} tokens, or is here already")
        if len(tokens) >= self.limits.max_model_len:
            raise TooLong(
                f"{work.key} has {len(tokens)} tokens, max_model_len is {self.limits.max_model_len}: raise"
                " --max-model-len or shorten the prompt"
            )
        needed = self._residency.blocks_for(len(tokens))
        if needed > self.pool.total:
            raise OutOfBlocks(f"{work.key} needs {needed} blocks, the cache has {self.pool.total}: raise --kv-memory")
        chain = HashChain(root, tokens, self.pool.block_size)
        sequence = Sequence(SequenceId(next(self._ids)), work, tokens, chain, hand_off)
        sequence.due = self._prefilled + STRETCH * len(tokens)
        return sequence

    def _growing(self) -> list[Sequence]:
        """The running sequences that have room for their next token, oldest first; others may be preempted for it."""
        running = self._table.within(RUNNING)
        ready: list[Sequence] = []
        for sequence_id in sorted(running):
            sequence = running.get(sequence_id)
            if sequence is not None and self._residency.grow(sequence):
                ready.append(sequence)
        return [sequence for sequence in ready if sequence.state is RUNNING]

    def _prompt_budget(self, growing: list[Sequence]) -> int:
        """Tokens of prompts that the step may take beside these: what is left of it, as far as their pace allows."""
        left = self.limits.max_batched_tokens - len(growing)
        if self.allowance.share is None or not (self._table.within(WAITING) or self._table.within(PREFILLING)):
            return left
        resident = sum(len(sequence.tokens) for sequence in growing)
        before = max((each.num_computed for each in self._table.within(PREFILLING).values()), default=0)
        allowed = self.allowance.tokens(len(growing), resident, before)
        return left if allowed is None else min(left, allowed)

    def _admit(self, budget: int) -> None:
        """Admit waiting sequences in order, as long as the work before the next one leaves it a share of the step."""
        waiting, prefilling = self._table.within(WAITING), self._table.within(PREFILLING)
        while waiting and self._residency.free_slots:
            head = min(waiting.values(), key=lambda each: each.rank)
            ahead = (each for each in prefilling.values() if each.rank < head.rank)
            left = budget - sum(each.context_len - each.num_computed for each in ahead)
            if left < min(self.pool.block_size, head.context_len) or not self._residency.admit(head):
                return

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of a prompt that fit the budget: all that are left, or up to a block boundary."""
        start, end = sequence.num_computed, sequence.context_len
        if end - start > budget:
            end = (start + budget) // self.pool.block_size * self.pool.block_size
        return max(0, end - start)

    def _launch(self, chosen: list[tuple[Sequence, int]]) -> StepBatch:
        copies = tuple(sequence.copy for sequence, _ in chosen if sequence.copy is not None)
        batch = StepBatch(tuple(self._slice(sequence, length) for sequence, length in chosen), copies)
        self._in_flight = batch
        self._computing = {sequence.id: sequence for sequence, _ in chosen}
        self._residency.step_begins(frozenset(self._computing))
        return batch

    def _slice(self, sequence: Sequence, length: int) -> Slice:
        start = sequence.num_computed
        end = start + length
        sample = None
        if end == len(sequence.tokens):
            params = sequence.work.request.sampling
            forbidden = forbidden_ids(params, self._eos, sequence.num_generated)
            counts = sequence.counted() if sequence.penalized else None
            sample = SampleSpec(params, sequence.key.choice, end, forbidden, counts)
        scoring = sequence.scoring(start, end) if sequence.scored else None
        return Slice(sequence.id, tuple(sequence.tokens[start:end]), start, sequence.block_table, sample, scoring)

    def _accept(self, sequence: Sequence, token: int, score: TokenScore | None) -> Outcome:
        """One more token of output, and what follows from it."""
        sequence.tokens.append(token)
        finish = finish_reason(
            sequence.work.request.sampling,
            self._eos,
            self.limits.max_model_len,
            last_token=token,
            num_generated=sequence.num_generated,
            num_tokens=len(sequence.tokens),
        )
        event = TokenEvent(sequence.key, sequence.num_generated - 1, token, finish, score)
        if sequence.hand_off:
            self._table.move(sequence, HANDING_OFF)
            return PrefillCompleted(sequence, event)
        if finish is not None:
            self._residency.finish(sequence)
        elif sequence.state is PREFILLING:
            self._table.move(sequence, RUNNING)
        return Emitted(sequence, event)

    def _land(self) -> None:
        self._in_flight = None
        self._computing = {}
        self._residency.step_ended()

    def _require_in_flight(self, batch: StepBatch) -> None:
        if batch is not self._in_flight:
            raise LedgerError("this is not the step in flight")
