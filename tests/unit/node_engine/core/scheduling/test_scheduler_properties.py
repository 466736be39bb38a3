"""Whatever the load, the budget and the cache: every job ends once, with the right tokens, and
every block comes back.

Preempted jobs are placed again, as the coordinator would, with the tokens that they have emitted.
"""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.types import AttemptKey, AttemptSpec, TicketId
from node_engine.core.blocks.block_records import BlockState
from node_engine.core.sequences.outcomes import (
    PrefillCompleted,
    PrefillRequeued,
    SequenceFailed,
    TokenEmitted,
)
from node_engine.core.sequences.sequence import Sequence, SequenceState
from tests.unit.node_engine.core.stepped_node import (
    BLOCK,
    SteppedNode,
    expected_tokens,
    make_work,
    transfer_kv,
)

# Two families of prompts that share beginnings of any length.
FAMILIES = [[(salt * 37 + 7 * position) % 997 + 1 for position in range(80)] for salt in (1, 2)]
prompts = st.builds(
    lambda family, shared, tail: FAMILIES[family][:shared] + [901 + token for token in tail],
    st.integers(0, 1),
    st.integers(1, 70),
    st.lists(st.integers(0, 3), max_size=10),
)


@dataclass
class TrackedJob:
    """A request and what its client has seen."""

    first_work: AttemptSpec
    tokens: list[int] = field(default_factory=list)
    attempt: int = 0

    @property
    def key(self) -> AttemptKey:
        return self.first_work.key._replace(attempt_number=self.attempt)

    @property
    def work(self) -> AttemptSpec:
        return replace(self.first_work, key=self.key, emitted_token_ids=tuple(self.tokens))

    def on_token(self, token: int, index: int) -> None:
        assert index == len(self.tokens), "a gap or a repeat"
        self.tokens.append(token)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    sizes=st.lists(
        st.tuples(prompts, st.integers(1, 30), st.integers(0, 12)), min_size=1, max_size=8
    ),
    num_blocks=st.integers(7, 20),
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 60),
)
def test_every_job_ends_once_with_its_tokens(
    sizes: list[tuple[list[int], int, int]], num_blocks: int, max_num_seqs: int, extra_budget: int
) -> None:
    node = SteppedNode(
        num_blocks,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_num_seqs - 1 + BLOCK + extra_budget,
    )
    jobs = [
        TrackedJob(make_work(number, prompt, length))
        for number, (prompt, length, _) in enumerate(sizes)
    ]
    arrivals = [arrival for _, _, arrival in sizes]
    ended: set[AttemptKey] = set()
    for turn in range(4000):
        for job, arrival in zip(jobs, arrivals, strict=True):
            if arrival == turn:
                node.add_work(job.work)
        batch = node.step()
        for outcome in node.outcomes:
            job = next(each for each in jobs if each.key == outcome.sequence.key)
            if isinstance(outcome, TokenEmitted):
                job.on_token(outcome.event.token_id, outcome.event.output_index)
                if outcome.event.finish_reason:
                    assert job.key not in ended
                    ended.add(job.key)
            elif isinstance(outcome, SequenceFailed):
                assert outcome.error.code == "preempted", "all of them fit"
                job.attempt += 1
                node.add_work(job.work)
        if batch is None and not node.outcomes and turn > max(arrivals):
            break
        node.outcomes.clear()
    assert len(ended) == len(jobs)
    assert [job.tokens for job in jobs] == [expected_tokens(job.first_work) for job in jobs]
    assert node.pool.num_available_blocks == node.pool.num_blocks
    assert not node.scheduler.sequences


@pytest.mark.slow
@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=12),
    budget=st.integers(BLOCK + 3, 200),
)
def test_prefill_order_follows_virtual_deadlines(lengths: list[int], budget: int) -> None:
    node = SteppedNode(num_blocks=200, max_num_seqs=4, max_batched_tokens=budget)
    jobs = [
        make_work(number, [1 + (97 * number + each) % 997 for each in range(size)])
        for number, size in enumerate(lengths)
    ]
    for job in jobs:
        node.add_work(job, is_prefill_only=True)
    node.run()
    completed = [each.event.key for each in node.outcomes if isinstance(each, PrefillCompleted)]
    ends = {key: number for number, key in enumerate(completed)}
    steps = {}
    for number, batch in enumerate(node.batches):
        for slice_ in batch.slices:
            steps[slice_.sequence_id] = number
    assert len(ends) == len(jobs)
    by_due = sorted(sorted(steps), key=lambda sequence: lengths[sequence])
    assert [steps[key] for key in by_due] == sorted(steps.values()), (
        "nobody ends before one that is due earlier"
    )
    for batch in node.batches[:-1]:
        assert batch.num_tokens > budget - BLOCK or len(batch.slices) == 4, (
            "less than a block of the budget is left over"
        )


class TwoNodes(RuleBasedStateMachine):
    """A prefill and a decode node under random interleavings of steps, tickets, losses and
    cancels."""

    @initialize(
        prefill_blocks=st.integers(6, 14),
        decode_blocks=st.integers(6, 14),
        budget=st.integers(0, 60),
    )
    def begin(self, prefill_blocks: int, decode_blocks: int, budget: int) -> None:
        self.prefill = SteppedNode(prefill_blocks, max_num_seqs=4, max_batched_tokens=19 + budget)
        self.decode = SteppedNode(decode_blocks, max_num_seqs=4, max_batched_tokens=19 + budget)
        self.jobs: dict[str, TrackedJob] = {}
        self.tickets: dict[AttemptKey, TicketId] = {}
        self.quarantined: list[TicketId] = []
        self.ready: dict[AttemptKey, Sequence] = {}
        self.done: dict[str, TrackedJob] = {}
        self.minted = 0

    @property
    def started(self) -> bool:
        return hasattr(self, "jobs")

    # what the coordinator does

    @precondition(lambda self: len(self.jobs) < 6)
    @rule(prompt=prompts, length=st.integers(1, 25))
    def submit(self, prompt: list[int], length: int) -> None:
        self.minted += 1
        self.place(TrackedJob(make_work(self.minted, prompt, length)))

    def place(self, job: TrackedJob) -> None:
        """Both legs at once, or, if decode has no room, the speculative one alone."""
        self.jobs[job.first_work.request.id] = job
        if -(-len(job.work.context_token_ids) // BLOCK) <= self.prefill.pool.num_blocks:
            self.prefill.add_work(job.work, is_prefill_only=True)
        self.offer_job(job)

    def offer_job(self, job: TrackedJob) -> None:
        if (
            job.key in self.tickets
            or -(-len(job.work.context_token_ids) // BLOCK) > self.decode.pool.num_blocks
        ):
            return
        self.minted += 1
        ticket = TicketId(f"t{self.minted}")
        if isinstance(
            self.decode.scheduler.reserve_for_handoff(job.work, self.decode.root, ticket), Sequence
        ):
            self.tickets[job.key] = ticket
            if self.prefill.scheduler.sequences.get(job.key) is not None:
                self.prefill.scheduler.mark_ticketed(job.key)

    def retry_job(self, job: TrackedJob) -> None:
        job.attempt += 1
        needed = -(
            -(
                len(job.first_work.request.prompt_token_ids)
                + job.first_work.request.sampling.max_tokens
            )
            // BLOCK
        )
        if needed > min(self.prefill.pool.num_blocks, self.decode.pool.num_blocks):
            del self.jobs[job.first_work.request.id]  # it can never fit: refused at admission
        else:
            self.place(job)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def offer_job_again(self, data: st.DataObject) -> None:
        job = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
        if self.decode.scheduler.sequences.get(job.key) is None:
            self.offer_job(job)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), fenced=st.booleans())
    def cancel(self, data: st.DataObject, fenced: bool) -> None:
        job = self.jobs.pop(data.draw(st.sampled_from(sorted(self.jobs))))
        self.prefill.scheduler.cancel_sequence(job.key)
        self.decode.scheduler.cancel_sequence(job.key)
        self.lose_attempt(job.key, fenced)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), fenced=st.booleans())
    def lose_hand_off(self, data: st.DataObject, fenced: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.tickets)))
        self.prefill.scheduler.cancel_sequence(key)
        self.decode.scheduler.cancel_sequence(key)
        self.lose_attempt(key, fenced)
        self.retry_job(self.jobs[key.request_id])

    def lose_attempt(self, key: AttemptKey, fenced: bool) -> None:
        self.ready.pop(key, None)
        ticket = self.tickets.pop(key, None)
        if ticket is not None and fenced:
            self.decode.pool.reservations.release_ticket(ticket)
        elif ticket is not None:
            self.decode.pool.reservations.quarantine_ticket(ticket)
            self.quarantined.append(ticket)

    @precondition(lambda self: self.quarantined)
    @rule()
    def fence(self) -> None:
        self.decode.pool.reservations.free_quarantined_ticket(self.quarantined.pop())

    # what the nodes do

    @rule()
    def prefill_step(self) -> None:
        self.prefill.step()
        for outcome in self.prefill.outcomes:
            if isinstance(outcome, PrefillCompleted):
                self.ready[outcome.event.key] = outcome.sequence
            elif isinstance(outcome, PrefillRequeued):
                self.ready.pop(outcome.sequence.key, None)
            else:
                raise AssertionError(f"{outcome} on a prefill node")
        self.prefill.outcomes = [
            each for each in self.prefill.outcomes if each.sequence.key in self.ready
        ]

    @rule()
    def decode_step(self) -> None:
        self.decode.step()
        self.read_decode()

    @precondition(lambda self: any(key in self.tickets for key in self.ready))
    @rule()
    def hand_off(self) -> None:
        key = next(key for key in self.ready if key in self.tickets)
        transfer_kv(self.prefill, self.decode, key, self.tickets.pop(key))
        del self.ready[key]
        self.read_decode()

    def read_decode(self) -> None:
        outcomes, self.decode.outcomes = self.decode.outcomes, []
        for outcome in outcomes:
            job = self.jobs[outcome.sequence.key.request_id]
            if isinstance(outcome, TokenEmitted):
                job.on_token(outcome.event.token_id, outcome.event.output_index)
                if outcome.event.finish_reason:
                    self.done[job.first_work.request.id] = self.jobs.pop(job.first_work.request.id)
            elif isinstance(outcome, SequenceFailed):
                self.retry_job(job)

    # what has to hold

    @invariant()
    def tokens_are_right(self) -> None:
        if self.started:
            for job in self.jobs.values():
                assert job.tokens == expected_tokens(job.first_work)[: len(job.tokens)]

    def teardown(self) -> None:
        if not self.started:
            return
        for ticket in self.quarantined:
            self.decode.pool.reservations.free_quarantined_ticket(ticket)
        self.quarantined.clear()
        for _ in range(3000):
            if not self.jobs:
                break
            for job in list(self.jobs.values()):
                if self.decode.scheduler.sequences.get(job.key) is None:
                    self.offer_job(job)
            self.prefill_step()
            while any(key in self.tickets for key in self.ready):
                self.hand_off()
            self.decode_step()
            self.tokens_are_right()
            for job in list(self.jobs.values()):  # one that fits on one node only
                if (
                    self.prefill.scheduler.sequences.get(job.key)
                    is self.decode.scheduler.sequences.get(job.key)
                    is None
                ):
                    needed = -(-len(job.work.context_token_ids) // BLOCK)
                    if needed > min(self.prefill.pool.num_blocks, self.decode.pool.num_blocks):
                        del self.jobs[job.first_work.request.id]
        assert not self.jobs, "somebody never ends"
        assert all(job.tokens == expected_tokens(job.first_work) for job in self.done.values())
        for node in (self.prefill, self.decode):
            assert node.pool.num_available_blocks == node.pool.num_blocks, node.pool.take_ledger()
            assert node.pool.ownership.count_blocks(BlockState.QUARANTINED) == 0
            assert node.scheduler.capacity.get_load().num_sequences_by_state == dict.fromkeys(
                SequenceState, 0
            )


TwoNodes.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestTwoNodes = pytest.mark.slow(TwoNodes.TestCase)
