"""A node without its shell: pool, scheduler and paced engine, run step by step and checked at every step."""

from collections.abc import Sequence

from baton.block_hash import BlockHash, root_hash
from baton.clock import FakeClock
from baton.types import AttemptKey, BlockIndex, Request, RequestId, SamplingParams, TicketId, Work
from node_engine.core.block_pool import BlockPool
from node_engine.core.outcome import Emitted, Failed, Outcome, PrefillCompleted
from node_engine.core.scheduler import Scheduler, SchedulerLimits
from node_engine.core.sequence import Sequence as NodeSequence
from node_engine.core.step import StepBatch
from node_engine.paced import FREE_OF_COST, PacedEngine, paced_reference

VOCAB = 1000
BLOCK = 16
T = TicketId("t")
PROMPT = [(7 * position) % 997 + 1 for position in range(512)]


def other(length: int, salt: int) -> list[int]:
    """A prompt that shares no beginning with any other."""
    return [(salt * 31 + position) % 997 + 1 for position in range(length)]


def shape(batch: StepBatch | None) -> list[tuple[int, int, bool]]:
    assert batch is not None
    return [(piece.start, len(piece.tokens), piece.sample is not None) for piece in batch.slices]


def work(
    name: str | int,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    emitted: Sequence[int] = (),
    min_tokens: int = 0,
    stop: Sequence[int] = (),
    ignore_eos: bool = False,
) -> Work:
    key = AttemptKey(RequestId(f"r{name}"), 0, 0)
    sampling = SamplingParams(
        max_tokens, min_tokens=min_tokens, ignore_eos=ignore_eos, stop_token_ids=tuple(stop), temperature=0.0
    )
    return Work(key, Request(key.request, tuple(prompt), sampling, timeout=60.0), tuple(emitted))


def expected(job: Work) -> list[int]:
    """Every token that the job has still to emit."""
    left = job.request.sampling.max_tokens - len(job.emitted)
    return paced_reference(job.context, left, VOCAB)


class Node:
    """`step()` is one turn of a node's compute loop."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        max_num_seqs: int = 8,
        max_batched_tokens: int = 64,
        max_model_len: int = 4096,
        eos_probability: float = 0.0,
    ) -> None:
        self.clock = FakeClock()
        self.engine = PacedEngine(FREE_OF_COST, vocab_size=VOCAB, eos_probability=eos_probability, clock=self.clock)
        self.arena = bytearray(num_blocks * self.engine.layout.block_bytes)
        self.engine.bind(memoryview(self.arena), num_blocks)
        self.pool = BlockPool(num_blocks, BLOCK, self.clock)
        limits = SchedulerLimits(max_num_seqs, max_batched_tokens, max_model_len)
        self.scheduler = Scheduler(self.pool, limits, self.engine.eos_token_ids)
        self.root: BlockHash = root_hash(self.engine.model_digest, self.engine.layout, b"")
        self.outcomes: list[Outcome] = []
        self.batches: list[StepBatch] = []

    def add(self, job: Work, *, hand_off: bool = False) -> NodeSequence:
        return self.scheduler.add(job, self.root, hand_off=hand_off)

    def step(self) -> StepBatch | None:
        """Returns the batch that was run, or None if there was nothing to compute."""
        plan = self.scheduler.next_step()
        self.outcomes += plan.outcomes
        if plan.batch is None:
            assert not self.scheduler.next_step().outcomes, "a plan without a batch settles everything"
        else:
            self.check_batch(plan.batch)
            self.batches.append(plan.batch)
            self.outcomes += self.scheduler.update(plan.batch, self.engine.run(plan.batch))
        self.pool.check()
        return plan.batch

    def run(self, max_steps: int = 5000) -> None:
        """Until there is nothing to compute."""
        for _ in range(max_steps):
            if self.step() is None:
                return
        raise AssertionError(f"no end after {max_steps} steps: {self.scheduler.load()}")

    def check_batch(self, batch: StepBatch) -> None:
        limits = self.scheduler.limits
        assert 0 < batch.num_tokens <= limits.max_batched_tokens
        assert len({piece.sequence for piece in batch.slices}) == len(batch.slices) <= limits.max_num_seqs
        assert len({destination for _, destination in batch.copies}) == len(batch.copies)
        written: dict[BlockIndex, int] = {}  # and the first token of the block that is
        copied = [each.copy[0] for each in self.scheduler.sequences() if each.copy is not None]
        for piece in batch.slices:
            sequence = self.scheduler.computing(piece.sequence)
            end = piece.start + len(piece.tokens)
            assert piece.tokens == tuple(sequence.tokens[piece.start : end])
            assert len(piece.block_table) * BLOCK >= end
            assert (piece.sample is None) == (end < len(sequence.tokens))
            assert end % BLOCK == 0 or end >= sequence.context_len, "a chunk ends inside a block"
            for number in range(piece.start // BLOCK, -(-end // BLOCK)):
                assert piece.block_table[number] not in written, "a block is written twice in a step"
                written[piece.block_table[number]] = max(0, piece.start - number * BLOCK)
        for block, first in written.items():
            assert self.pool.refs(block) == 1 + copied.count(block), "a shared block is written"
            found = len(self.pool.index.entry(block).tokens) if block in self.pool.index else 0
            assert found <= first, "what others can find is written"

    def emitted(self, job: Work) -> list[int]:
        events = [each.event for each in self.outcomes if isinstance(each, Emitted) and each.event.key == job.key]
        assert [event.index for event in events] == list(range(len(job.emitted), len(job.emitted) + len(events)))
        assert all(event.finish is None for event in events[:-1])
        return [event.token for event in events]

    def errors(self) -> dict[AttemptKey, str]:
        return {each.sequence.key: each.error.code for each in self.outcomes if isinstance(each, Failed)}


def deliver(source: Node, target: Node, key: AttemptKey, ticket: TicketId) -> None:
    """What the transfer plane does: copy the promised blocks from arena to arena, then seal and commit."""
    sent, awaited = source.scheduler.get(key), target.scheduler.get(key)
    assert sent is not None
    assert awaited is not None
    size = source.engine.layout.block_bytes
    first = len(awaited.block_table)
    target.pool.mark_writing(ticket)
    for number, destination in enumerate(awaited.promised):
        block = sent.block_table[first + number]
        target.arena[destination * size : (destination + 1) * size] = source.arena[block * size : (block + 1) * size]
    completed = next(
        each for each in reversed(source.outcomes) if isinstance(each, PrefillCompleted) and each.event.key == key
    )
    target.outcomes += target.scheduler.adopt(key, (completed.event.token,))
    source.scheduler.release(key)
