"""A node without its shell: pool, scheduler and paced engine, run step by step and checked at every
step."""

from collections.abc import Sequence

from baton.kv.blocks import BlockHash, root_hash
from baton.process.clock import FakeClock
from baton.types import (
    AttemptKey,
    AttemptSpec,
    BlockIndex,
    Request,
    RequestId,
    SamplingParams,
    TicketId,
)
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.scheduling.capacity import SchedulerLimits
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.sequences.outcomes import (
    PrefillCompleted,
    SequenceFailed,
    SequenceOutcome,
    TokenEmitted,
)
from node_engine.core.sequences.sequence import Sequence as NodeSequence
from node_engine.core.speculation.model_drafter import ModelDrafter
from node_engine.core.step.step_batch import StepBatch
from node_engine.paced.costs import ZERO_COSTS
from node_engine.paced.paced_engine import PacedEngine
from tests.paced_reference import paced_reference_tokens

VOCAB = 1000
BLOCK = 16
TICKET_ID = TicketId("t")
PROMPT = [(7 * position) % 997 + 1 for position in range(512)]


def unshared_prompt(length: int, salt: int) -> list[int]:
    """A prompt that shares no beginning with any other."""
    return [(salt * 31 + position) % 997 + 1 for position in range(length)]


def batch_shape(batch: StepBatch | None) -> list[tuple[int, int, bool]]:
    assert batch is not None
    return [
        (slice_.start, len(slice_.token_ids), slice_.sample_spec is not None)
        for slice_ in batch.slices
    ]


def make_work(
    name: str | int,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    emitted: Sequence[int] = (),
    min_tokens: int = 0,
    stop: Sequence[int] = (),
    ignore_eos: bool = False,
    logit_bias: tuple[tuple[int, float], ...] = (),
) -> AttemptSpec:
    key = AttemptKey(RequestId(f"r{name}"), 0, 0)
    sampling = SamplingParams(
        max_tokens,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=tuple(stop),
        temperature=0.0,
        logit_bias=logit_bias,
    )
    return AttemptSpec(
        key, Request(key.request_id, tuple(prompt), sampling, timeout_seconds=60.0), tuple(emitted)
    )


def expected_tokens(work: AttemptSpec) -> list[int]:
    """Every token that the job has still to emit."""
    left = work.request.sampling.max_tokens - len(work.emitted_token_ids)
    return paced_reference_tokens(work.context_token_ids, left, VOCAB)


class SteppedNode:
    """`step()` is one turn of a node's compute loop."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        max_num_seqs: int = 8,
        max_batched_tokens: int = 64,
        max_model_len: int = 4096,
        eos_probability: float = 0.0,
        vocab_size: int = VOCAB,
        max_draft_tokens: int = 0,
        drafter: ModelDrafter | None = None,
    ) -> None:
        """With few tokens in the vocabulary, drafts are right now and then."""
        self.clock = FakeClock()
        self.engine = PacedEngine(
            ZERO_COSTS, vocab_size=vocab_size, eos_probability=eos_probability, clock=self.clock
        )
        self.arena = bytearray(num_blocks * self.engine.layout.block_bytes)
        self.engine.bind_cache(memoryview(self.arena), num_blocks)
        self.pool = BlockPool(num_blocks, BLOCK, self.clock)
        limits = SchedulerLimits(
            max_num_seqs,
            max_batched_tokens,
            max_model_len,
            max_draft_tokens=max_draft_tokens,
        )
        self.scheduler = Scheduler(self.pool, limits, self.engine.eos_token_ids)
        if drafter is not None:
            self.scheduler.speculator.use_draft_model(drafter)
        self.root: BlockHash = root_hash(self.engine.model_digest, self.engine.layout, b"")
        self.outcomes: list[SequenceOutcome] = []
        self.batches: list[StepBatch] = []

    def add_work(self, work: AttemptSpec, *, is_prefill_only: bool = False) -> NodeSequence:
        return self.scheduler.add_sequence(work, self.root, is_prefill_only=is_prefill_only)

    def step(self) -> StepBatch | None:
        """Returns the batch that was run, or None if there was nothing to compute."""
        plan = self.scheduler.schedule_step()
        self.outcomes += plan.outcomes
        if plan.batch is None:
            assert not self.scheduler.schedule_step().outcomes, (
                "a plan without a batch settles everything"
            )
        else:
            self.check_batch(plan.batch)
            self.batches.append(plan.batch)
            self.outcomes += self.scheduler.update_from_results(
                plan.batch, self.engine.run(plan.batch)
            )
        self.pool.check_invariants()
        return plan.batch

    def run(self, max_steps: int = 5000) -> None:
        """Until there is nothing to compute."""
        for _ in range(max_steps):
            if self.step() is None:
                return
        raise AssertionError(
            f"no end after {max_steps} steps: {self.scheduler.capacity.get_load()}"
        )

    def check_batch(self, batch: StepBatch) -> None:
        limits = self.scheduler.limits
        assert 0 < batch.num_tokens <= limits.max_batched_tokens
        assert (
            len({slice_.sequence_id for slice_ in batch.slices})
            == len(batch.slices)
            <= limits.max_num_seqs
        )
        assert len({destination for _, destination in batch.block_copies}) == len(
            batch.block_copies
        )
        written: dict[BlockIndex, int] = {}  # and the first token of the block that is
        copied = [
            each.pending_copy[0]
            for each in self.scheduler.sequences
            if each.pending_copy is not None
        ]
        for slice_ in batch.slices:
            sequence = self.scheduler.sequences_in_flight[slice_.sequence_id]
            end = slice_.start + len(slice_.token_ids)
            known = end - len(slice_.draft_specs)
            assert slice_.token_ids[: known - slice_.start] == tuple(
                sequence.token_ids[slice_.start : known]
            )
            assert not slice_.draft_specs or known == len(sequence.token_ids)
            assert len(slice_.block_table) * BLOCK >= end
            assert (slice_.sample_spec is None) == (known < len(sequence.token_ids))
            assert end % BLOCK == 0 or end >= sequence.context_len, "a chunk ends inside a block"
            for number in range(slice_.start // BLOCK, -(-end // BLOCK)):
                assert slice_.block_table[number] not in written, (
                    "a block is written twice in a step"
                )
                written[slice_.block_table[number]] = max(0, slice_.start - number * BLOCK)
        for block, first in written.items():
            assert self.pool.ownership.get_ref_count(block) == 1 + copied.count(block), (
                "a shared block is written"
            )
            found = (
                len(self.pool.prefix_index.get_entry(block).token_ids)
                if block in self.pool.prefix_index
                else 0
            )
            assert found <= first, "what others can find is written"

    def emitted_tokens(self, work: AttemptSpec) -> list[int]:
        events = [
            each.event
            for each in self.outcomes
            if isinstance(each, TokenEmitted) and each.event.key == work.key
        ]
        assert [event.output_index for event in events] == list(
            range(len(work.emitted_token_ids), len(work.emitted_token_ids) + len(events))
        )
        assert all(event.finish_reason is None for event in events[:-1])
        return [event.token_id for event in events]

    def error_codes(self) -> dict[AttemptKey, str]:
        return {
            each.sequence.key: each.error.code
            for each in self.outcomes
            if isinstance(each, SequenceFailed)
        }


def transfer_kv(
    source: SteppedNode, target: SteppedNode, key: AttemptKey, ticket: TicketId
) -> None:
    """What the transfer plane does: copy the promised blocks from arena to arena, then seal and
    commit."""
    sent, awaited = source.scheduler.sequences.get(key), target.scheduler.sequences.get(key)
    assert sent is not None
    assert awaited is not None
    size = source.engine.layout.block_bytes
    first = len(awaited.block_table)
    target.pool.reservations.mark_writing(ticket)
    for number, destination in enumerate(awaited.reserved_blocks):
        block = sent.block_table[first + number]
        target.arena[destination * size : (destination + 1) * size] = source.arena[
            block * size : (block + 1) * size
        ]
    completed = next(
        each
        for each in reversed(source.outcomes)
        if isinstance(each, PrefillCompleted) and each.event.key == key
    )
    target.outcomes += target.scheduler.commit_handoff(key, (completed.event.token_id,))
    source.scheduler.finish_handoff(key)
